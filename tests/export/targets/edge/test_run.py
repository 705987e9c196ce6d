"""The script of `slipway export edge` preprocesses inputs as Slipway does."""

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipway.export.targets.edge import run
from slipway.export.targets.edge.run import (
    InputError,
    bytes_of,
    pixels_of,
    row_of,
    text_of,
    tokens_of,
)
from slipway.export.targets.exported import exported_contract
from slipway.inputs import personal_data
from slipway.inputs.columns import encode_rows, read_row
from slipway.inputs.images import array_from_bytes
from slipway.inputs.texts import TextContract, encode_texts, read_text
from slipway.system.errors import CellError
from tests.encoder_folders import word_piece
from tests.export.targets.pngs import chunk, contract_of, every_kind, raw_png
from tests.export.targets.sources import HOSTILE, pairs, photo
from tests.serving.bundles import COLUMNS, ROW, TEXTS, table_row
from tests.tokens import token_contract

FACTS = json.loads(COLUMNS.model_dump_json())


def test_script_decodes_every_kind_of_png_and_jpeg_to_the_pixels_of_training() -> None:
    chance = random.Random(9)
    cases = every_kind(chance)
    for colour_type, content in ((0, b"\0\1"), (2, b"\0\1\0\2\0\3"), (3, b"\x00\x80\xff\x10")):
        png = raw_png(colour_type, 8, (17, 11), chance, extra=chunk(b"tRNS", content))
        cases += [(contract_of("stretch", "bilinear", channels), png) for channels in (1, 3)]
    for size in ((40, 30), (31, 64)):
        cases.append((contract_of("crop", "lanczos", 3), photo(3, size, "JPEG")))
    for number, (contract, payload) in enumerate(cases):
        found = pixels_of(payload, contract.model_dump())
        assert np.array_equal(found, array_from_bytes(payload, contract)), number


def test_script_encodes_table_rows_as_training_does() -> None:
    rows: list[dict[str, Any]] = [table_row(number) for number in range(30)]
    rows += [ROW | {"since": "2021-03-04T05:06:07.25+02:00"}, ROW | {"city": "nowhere"}]
    for row in rows:
        expected = encode_rows([read_row(row, COLUMNS)], COLUMNS)[0]
        assert np.array_equal(row_of(row, FACTS), expected), row


@pytest.mark.parametrize(
    "change",
    [
        *({"age": 121}, {"age": None}, {"age": "41"}, {"age": True}, {"age": 10**400}),
        *({"colour": "pink"}, {"member": 1}, {"since": "yesterday"}, {"shoe": 1}),
        {"income": 1e300},
    ],
)
def test_script_refuses_the_same_rows_as_the_service_with_fault_expectation_and_fix(
    change: dict[str, Any],
) -> None:
    row = ROW | change
    with pytest.raises(CellError):
        encode_rows([read_row(row, COLUMNS)], COLUMNS)
    with pytest.raises(InputError, match=r"found .*, expected .*\. \w+.*\.$"):
        row_of(row, FACTS)


def test_the_script_refuses_other_formats_and_too_many_pixels() -> None:
    stream = io.BytesIO()
    Image.new("RGB", (9, 9)).save(stream, "WEBP")
    contract = contract_of("stretch", "bilinear", 3).model_dump()
    with pytest.raises(InputError, match="expected a whole PNG or JPEG"):
        pixels_of(stream.getvalue(), contract)
    with pytest.raises(InputError, match="found 200x200 pixels, expected at most 10000"):
        pixels_of(raw_png(0, 8, (200, 200), random.Random(1)), contract)


@pytest.mark.parametrize(
    "contract",
    [
        TEXTS,
        TEXTS.model_copy(update={"max_bytes": 200, "masked": ["email", "phone", "card"]}),
        TEXTS.model_copy(update={"columns": ["a", "b"], "masked": ["phone"]}),
        token_contract(),
        token_contract(tokenizer=word_piece(), columns=["a", "b"], is_pair=True),
    ],
    ids=["bytes", "masked", "two columns", "tokens", "pairs"],
)
def test_script_encodes_hostile_texts_and_pairs_as_training_does(
    contract: TextContract, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An exported folder has the script and the module that finds personal data.
    monkeypatch.setattr(run, "HERE", Path(personal_data.__file__).parent)
    facts = exported_contract(contract)
    rows = pairs(HOSTILE) if len(contract.columns) > 1 else [{"text": text} for text in HOSTILE]
    for row in rows:
        expected = encode_texts([read_text(row, contract)], contract)[0]
        text = text_of(row, facts)
        found = tokens_of(text, facts, 2) if contract.tokenizer else bytes_of(text, facts)
        assert np.array_equal(found, expected[: len(found)]), row
        assert not expected[len(found) :].any()


@pytest.mark.parametrize(
    "row",
    [{}, {"text": " \n"}, {"text": "\u200b"}, {"text": 3}, {"other": "x"}, {"text": "a" * 1001}],
)
def test_script_refuses_the_same_texts_as_the_service_with_fault_expectation_and_fix(
    row: dict[str, Any],
) -> None:
    with pytest.raises(CellError):
        read_text(row, TEXTS)
    with pytest.raises(InputError, match=r"found .*, expected .*\. \w+.*\.$"):
        text_of(row, exported_contract(TEXTS))
