"""Makes certified models of images, tables and texts with test rows, without training."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.certificate import read_certificate
from slipway.export.certification.comparison import HopComparison
from slipway.export.certification.http_hop import RowPayload
from slipway.export.certification.measurement import TestRows
from slipway.export.targets.exported import CertifiedRows, ExportSource
from slipway.inputs.columns import encode_rows, read_row
from slipway.inputs.images import array_from_bytes
from slipway.inputs.texts import TextContract, encode_texts, read_text
from slipway.metrics.scores import Resampling
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    LABELS,
    TEXTS,
    certify,
    classifier,
    row_classifier,
    table_row,
    text_classifier,
    write_bundle,
)
from tests.tokens import bpe

RESAMPLING = Resampling(seed=7, num_samples=50, confidence=0.95)


def photo(seed: int, size: tuple[int, int], kind: str = "PNG", alpha: bool = False) -> bytes:
    """Return an encoded smooth picture with noise; `size` is (width, height)."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize(size, Image.Resampling.BICUBIC)).astype(int)
    noisy = np.clip(pixels + generator.integers(-9, 10, pixels.shape), 0, 255).astype(np.uint8)
    image = Image.fromarray(noisy)
    if alpha:
        image.putalpha(Image.fromarray(generator.integers(0, 256, size[::-1], dtype=np.uint8)))
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def photos(count: int = 12) -> list[bytes]:
    """Return PNGs of several sizes; every third has transparency."""
    return [photo(row, (20 + row, 31 - row), alpha=row % 3 == 0) for row in range(count)]


def image_source(folder: Path, payloads: Sequence[bytes], **changes: Any) -> ExportSource:
    """Return a certified model of images whose test rows are `payloads`."""
    inputs = np.stack([array_from_bytes(payload, CONTRACT) for payload in payloads])
    return _source(folder, inputs, payloads, "image_classification", None, **changes)


def planted_operator(folder: Path, operator: str, domain: str = "") -> ExportSource:
    """Return a model of images whose graph has the operator before its last one.

    The probabilities do not depend on it.
    """
    source, graph = image_source(folder / "certified", photos()), classifier()
    nodes = [
        helper.make_node(operator, ["logits"], ["other"], domain=domain),
        helper.make_node("Cast", ["other"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["number", "zero"], ["nothing"]),
        helper.make_node("Add", ["logits", "nothing"], ["sums"]),
    ]
    last = graph.graph.node.pop()
    last.input[0] = "sums"
    graph.graph.node.extend([*nodes, last])
    graph.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "zero"))
    if domain:
        graph.opset_import.append(helper.make_opsetid(domain, 1))
    planted = write_bundle(folder / "planted", graph)
    return ExportSource(planted, source.certificate, "fp32", source.rows)


def table_source(folder: Path, count: int = 20) -> ExportSource:
    """Return a certified model of a table."""
    rows = [table_row(number) for number in range(count)]
    inputs = encode_rows([read_row(row, COLUMNS) for row in rows], COLUMNS)
    payloads = [json.dumps(row).encode() for row in rows]
    return _source(folder, inputs, payloads, "table_classification", row_classifier())


PERSONAL = (
    "mail a.b+c@x-y.co.uk, now", "\u90ae\u7bb1a@b.com\u8c22\u8c22", "call 09061701461.",
    "+44 (0)20 7946 0958 or 0049 30 123456", "(212) 555-0199 and \u625313812345678\u627e\u6211",
    "card 4111 1111 1111 1111 ok", "5500-0000-0000-0004", "4111111111111112 2024-01-02 10:20",
    "0.123456789 or 1,234,567,890", "\u0661" * 12 + " 12345678901234", "a@b or @name or name@",
    # Digits of other scripts: Arabic, full width, mathematical; and of Unicode 16.
    "\u0660" + "\u0661" * 9, "\uff10\uff13\uff10\uff11\uff12\uff13\uff14\uff15\uff16\uff17",
    "\U0001d7ce\U0001d7e1\U0001d7f6\U0001d7d1\U0001d7d2\U0001d7d3\U0001d7d4\U0001d7d5\U0001d7d6",
    "\U00010d400301234567 0301234567\U00010d41", "😀a@b.co-012 0301234567", "[phone]0301234567",
)  # fmt: skip
HOSTILE = (
    *PERSONAL,
    " Cafe\u0301\x00\t n\u0303 ", "\ufeffmark \u200b", "\ud83d alone \udc00", "😀" * 30,
    "é" * 33 + "漢",
    "a" * 64, "a" * 65, "e" * 62 + "漢", "\u1100\u1161\u11a8 \uac00\u11a8", "\u0f73\u0f71\u0344",
    "q\u0307\u0323 " * 9, "\x85next\u2028line\x1f", "\u00a0nbsp\u3000", "a" + "\u0301\u0316" * 200,
    # Characters that compose since Unicode 16, which Python 3.11 does not know.
    "\U000113c5\U000113c2 \U00016121\U00016129", "\U000105d2\u0307 \U000105da\u0307",
    "\ufdd0\uffff\U0010ffff end", "\u212b \u2126 \ufb1d", "\ufb01le \u00bd \uff41 \u2122",
)  # fmt: skip


def pairs(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows of two text columns: each text with the next one, and with none."""
    both = [{"a": one, "b": other} for one, other in zip(texts, [*texts[1:], "last"], strict=True)]
    return both + [{"b": text} for text in texts[:9]] + [{"a": text} for text in texts[:9]]


def roberta() -> str:
    """Return a tokenizer in the form of RoBERTa's, with the BPE that the tests learn."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(bpe())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    processor: dict[str, Any] = {
        "type": "RobertaProcessing",
        "trim_offsets": True,
        "add_prefix_space": False,
    }
    for name, token in (("cls", "<s>"), ("sep", "</s>")):
        processor[name] = [token, tokenizer.token_to_id(token)]
    return json.dumps(json.loads(tokenizer.to_str()) | {"post_processor": processor})


def text_source(
    folder: Path, contract: TextContract = TEXTS, graph: Any = None, **changes: Any
) -> ExportSource:
    """Return a certified model of hostile texts, or of pairs of them for two columns."""
    is_pair = len(contract.columns) > 1
    rows = pairs(HOSTILE) if is_pair else [{"text": text} for text in HOSTILE]
    inputs = encode_texts([read_text(row, contract) for row in rows], contract)
    payloads = [json.dumps(row).encode() for row in rows]
    graph = graph or text_classifier()
    return _source(folder, inputs, payloads, "text_classification", graph, **changes)


def trained_text_source(folder: Path, name: str, contract: TextContract = TEXTS) -> ExportSource:
    """Return a certified text network with random weights, exported like Slipway's own."""
    import torch

    from slipway.export.graphs.graph import export_graph
    from slipway.training.networks.networks import NetworkSpec, build_network
    from tests.calibrations import calibrated

    arguments: dict[str, Any] = {
        "hashed_ngrams": {
            "buckets": 4096,
            "width": 4,
            "word_ngrams": 2,
            "byte_ngrams": [2, 3],
            "lowercase": True,
            "dropout": 0.0,
        },
        "small_transformer": {
            "width": 16,
            "num_layers": 1,
            "num_heads": 2,
            "dropout": 0.0,
            "patch": 1 if contract.tokenizer else 4,
        },
    }
    torch.manual_seed(1)
    spec = NetworkSpec(
        task="text_classification",
        name=name,
        arguments=arguments[name],
        classes=LABELS,
        input=contract,
        mean=[],
        std=[],
        target_scale=None,
    )
    network = calibrated(build_network(spec).eval(), contract.example_rows(8))
    output = OutputContract(kind="probabilities", labels=LABELS)
    content = export_graph(network, contract, output, opset=18, max_batch_size=16)
    graph = onnx.load_model_from_string(content)
    names = {"input_name": graph.graph.input[0].name, "output_name": graph.graph.output[0].name}
    return text_source(folder, contract, graph, input=contract, **names)


def _source(
    folder: Path,
    inputs: NDArray[Any],
    payloads: Sequence[bytes],
    task: Any,
    graph: Any,
    **changes: Any,
) -> ExportSource:
    bundle = write_bundle(folder / "bundle", graph, **changes)
    certificate = read_certificate(certify(folder / "certificate.json", bundle))
    ids = [f"row{number}" for number in range(len(payloads))]
    targets = np.arange(len(ids)) % len(LABELS)
    rows = TestRows(task, LABELS, ids, ids, inputs, targets)
    found = [RowPayload(row, ids[row], content, "") for row, content in enumerate(payloads)]
    return ExportSource(
        bundle,
        certificate,
        "fp32",
        CertifiedRows(
            HopComparison(rows, RESAMPLING), lambda: iter(found), 1e-5, {"int8": 0.01}, 3
        ),
    )
