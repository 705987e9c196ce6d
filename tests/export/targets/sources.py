"""Certified models of images, tables and texts with test rows, made without training."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.certificate import read_certificate
from slipway.export.certification.comparison import HopComparison, TestRows
from slipway.export.certification.http_hop import RowPayload
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
    row_classifier,
    table_row,
    text_classifier,
    write_bundle,
)

RESAMPLING = Resampling(seed=7, num_samples=50, confidence=0.95)


def photo(seed: int, size: tuple[int, int], kind: str = "PNG", alpha: bool = False) -> bytes:
    """An encoded smooth picture with noise, as large as (width, height)."""
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
    """PNGs of several sizes, each third with transparency."""
    return [photo(row, (20 + row, 31 - row), alpha=row % 3 == 0) for row in range(count)]


def image_source(folder: Path, payloads: Sequence[bytes], **changes: Any) -> ExportSource:
    """A certified model of images whose test rows are `payloads`."""
    inputs = np.stack([array_from_bytes(payload, CONTRACT) for payload in payloads])
    return _source(folder, inputs, payloads, "image_classification", None, **changes)


def table_source(folder: Path, count: int = 20) -> ExportSource:
    """A certified model of a table."""
    rows = [table_row(number) for number in range(count)]
    inputs = encode_rows([read_row(row, COLUMNS) for row in rows], COLUMNS)
    payloads = [json.dumps(row).encode() for row in rows]
    return _source(folder, inputs, payloads, "table_classification", row_classifier())


HOSTILE = (
    " Cafe\u0301\x00\t n\u0303 ", "\ufeffmark \u200b", "\ud83d alone \udc00", "😀" * 30,
    "é" * 33 + "漢",
    "a" * 64, "a" * 65, "e" * 62 + "漢", "\u1100\u1161\u11a8 \uac00\u11a8", "\u0f73\u0f71\u0344",
    "q\u0307\u0323 " * 9, "\x85next\u2028line\x1f", "\u00a0nbsp\u3000", "a" + "\u0301\u0316" * 200,
    # Characters that compose since Unicode 16, which Python 3.11 does not know.
    "\U000113c5\U000113c2 \U00016121\U00016129", "\U000105d2\u0307 \U000105da\u0307",
    "\ufdd0\uffff\U0010ffff end", "\u212b \u2126 \ufb1d", "\ufb01le \u00bd \uff41 \u2122",
)  # fmt: skip


def text_source(
    folder: Path, contract: TextContract = TEXTS, graph: Any = None, **changes: Any
) -> ExportSource:
    """A certified model of hostile texts."""
    rows = [{"text": text} for text in HOSTILE]
    inputs = encode_texts([read_text(row, contract) for row in rows], contract)
    payloads = [json.dumps(row).encode() for row in rows]
    graph = graph or text_classifier()
    return _source(folder, inputs, payloads, "text_classification", graph, **changes)


def trained_text_source(folder: Path, name: str, contract: TextContract = TEXTS) -> ExportSource:
    """A certified network for texts with random weights, exported as Slipway's own are."""
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
