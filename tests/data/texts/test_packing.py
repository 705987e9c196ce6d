"""Tests of the packed store of texts, and of raw rows in the form in which clients send them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from slipway.config.params import parse_params
from slipway.data.store.packed import PackPaths, open_split, read_manifest
from slipway.data.texts.cleaning import clean_texts
from slipway.data.texts.packing import learned_tokenizer, pack_texts
from slipway.data.texts.source import raw_rows
from slipway.inputs.texts import (
    TextContract,
    decode_row,
    encode_texts,
    read_text,
    read_tokenizer,
    text_of,
)
from slipway.system.errors import IntegrityError, ParamsError
from tests.encoder_folders import word_piece
from tests.project_params import PROJECT, of_kind
from tests.sentences import sentences
from tests.tokens import bpe

pytestmark = pytest.mark.unit
ROWS = [
    {"label": label, "title": f"Title {n}", "text": f"  body\u0000 {n} \u5f88\u597d " * (n + 1)}
    for n, label in enumerate(["a", "b"] * 6)
]


TOKENS = {"tokenizer": "bpe", "vocabulary_size": 300, "max_tokens": 24}


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, str]:
    return pack(tmp_path)


def pack(tmp_path: Path, **precompute: Any) -> tuple[Path, str]:
    """Clean and pack ROWS; return the folder and the printed text."""
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    content = of_kind(PROJECT.model_dump(mode="json"), "text_classification")
    content["data"] |= {"path": str(tmp_path / "texts.jsonl"), "text_columns": ["title", "text"]}
    content["precompute"] |= {"max_text_bytes": 64, **precompute}
    content["train"] |= {
        "network": "small_transformer",
        "network_arguments": {
            "width": 8,
            "num_layers": 1,
            "num_heads": 1,
            "patch": 1,
            "dropout": 0.0,
        },
    }
    params = parse_params(content)
    result = clean_texts(params.data, params.clean)
    (tmp_path / "clean").mkdir()
    result.write(tmp_path / "clean")
    rows = result.cleaned.rows
    splits = [("train", "val", "test")[n % 3] for n in range(rows.num_rows)]
    rows = rows.append_column(pa.field("split", pa.string(), nullable=False), pa.array(splits))
    rows = rows.append_column(pa.field("fold", pa.int32()), pa.nulls(len(splits), pa.int32()))
    leaked = pa.array([False] * len(splits))
    rows = rows.append_column(pa.field("leaked", pa.bool_(), nullable=False), leaked)
    paths = PackPaths(tmp_path / "clean", tmp_path / "packed", tmp_path / "work")
    return tmp_path, pack_texts(params, rows, paths)


@pytest.mark.parametrize("precompute", [{}, TOKENS], ids=["bytes", "tokens"])
def test_packed_texts_equal_the_encoded_requests_of_a_client_bit_for_bit(
    tmp_path: Path, precompute: dict[str, Any]
) -> None:
    folder, _ = pack(tmp_path, **precompute)
    manifest = read_manifest(folder / "packed")
    contract = manifest.input
    assert isinstance(contract, TextContract)
    data = PROJECT.data.model_copy(
        update={"path": str(folder / "texts.jsonl"), "task": "text_classification"}
    )
    num_rows = 0
    for name in ("train", "val", "test"):
        split = open_split(folder / "packed", manifest, name, verify=True)
        sent = {row_id: body for _, row_id, body in raw_rows(data, contract, set(split.sources))}
        texts = [read_text(json.loads(sent[row_id]), contract) for row_id in split.ids]
        np.testing.assert_array_equal(split.inputs[:], encode_texts(texts, contract))
        num_rows += len(split)
    assert num_rows == len(ROWS)
    assert manifest.classes == ["a", "b"]


def test_precompute_prints_the_number_of_truncated_texts(packed: tuple[Path, str]) -> None:
    # Row n has 14 n + 21 bytes: "Title n", a separator, and n + 1 times "body n" and 6 bytes.
    assert "packed 12 texts of at most 64 bytes\n8 texts are longer and were cut" in packed[1]


def test_precompute_prints_the_number_of_tokens(tmp_path: Path) -> None:
    _, printed = pack(tmp_path, **TOKENS)
    assert printed.startswith("packed 12 texts of at most 64 bytes, as at most 24 of 274 tokens")
    assert printed.endswith("were cut: precompute.max_text_bytes is 64, max_tokens 24")


def test_the_tokenizer_is_learned_from_training_rows_only(tmp_path: Path) -> None:
    folder, _ = pack(tmp_path, **TOKENS)
    manifest = read_manifest(folder / "packed")
    contract = manifest.input
    assert isinstance(contract, TextContract)
    rows = {name: open_split(folder / "packed", manifest, name) for name in ("train", "val")}
    bodies = {
        name: [text_of([ROWS[number]["title"], ROWS[number]["text"]], contract) for number in own]
        for name, own in (
            (name, [int(source.split(":")[0]) for source in split.sources])
            for name, split in rows.items()
        )
    }
    assert contract.tokenizer == learned_tokenizer(bodies["train"], 300)
    assert contract.tokenizer != learned_tokenizer(bodies["train"] + bodies["val"], 300)


def test_the_learned_tokenizer_is_the_same_in_each_run_and_for_any_row_order() -> None:
    texts = [text for _, text in sentences(2000, seed=2)]
    first = learned_tokenizer(texts, 1000)
    assert learned_tokenizer(reversed(texts), 1000) == first
    assert len(json.loads(first)["model"]["vocab"]) == 1000


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_tokenizer_from_a_folder_or_file_is_stored_without_padding_and_truncation(
    tmp_path: Path, is_folder: bool
) -> None:
    content = json.loads(bpe()) | {"truncation": None}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert read_tokenizer(tmp_path if is_folder else tmp_path / "tokenizer.json") == bpe()


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_tokenizer_that_is_missing_or_unreadable_is_refused(
    tmp_path: Path, content: str | None
) -> None:
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ParamsError, match=r"precompute\.tokenizer is .*expected"):
        read_tokenizer(tmp_path)


def test_raw_texts_that_changed_since_clean_are_refused(packed: tuple[Path, str]) -> None:
    folder, _ = packed
    contract = read_manifest(folder / "packed").input
    assert isinstance(contract, TextContract)
    (folder / "texts.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    data = PROJECT.data.model_copy(
        update={"path": str(folder / "texts.jsonl"), "task": "text_classification"}
    )
    with pytest.raises(IntegrityError, match="changed since it was cleaned"):
        list(raw_rows(data, contract, {"0", "5"}))


def test_a_tokenizer_with_a_pair_template_encodes_two_columns_as_a_pair(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(word_piece())
    tokens = {"tokenizer": str(tmp_path), "vocabulary_size": None, "max_tokens": 24}
    packed = pack(tmp_path, **tokens)[0] / "packed"
    manifest = read_manifest(packed)
    contract = manifest.input
    assert isinstance(contract, TextContract)
    assert contract.is_pair
    row = np.asarray(open_split(packed, manifest, "train").inputs[0])
    assert row.tolist().count((contract.pair_separator or 0) + 1) == 2
    shown = decode_row(row, contract).split("\n")
    assert shown[0].startswith("title")
    assert shown[1].startswith("body")


def test_a_tokenizer_without_pairs_reads_columns_joined_by_a_line_break(tmp_path: Path) -> None:
    packed = pack(tmp_path, **TOKENS)[0] / "packed"
    manifest = read_manifest(packed)
    contract = manifest.input
    assert isinstance(contract, TextContract)
    assert not contract.is_pair
    assert "\nbody" in decode_row(open_split(packed, manifest, "train").inputs[0], contract)
