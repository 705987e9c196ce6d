"""Texts that Python callers and files pass."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from slipway.inference.texts import TextReader, read_text_table
from slipway.inputs.texts import TextContract, decode_row
from slipway.system.errors import CellError, DataError

pytestmark = pytest.mark.unit
ONE = TextContract(kind="texts", columns=["text"], max_bytes=32, max_characters=100)
TWO = TextContract(kind="texts", columns=["title", "text"], max_bytes=32, max_characters=None)


def texts(given: object, contract: TextContract = ONE) -> tuple[list[str], bool]:
    batches, is_list = TextReader(contract).read(given, batch_size=2)
    return [decode_row(row, contract) for batch in batches for row in batch], is_list


def test_strings_dicts_lists_and_tables_of_texts_give_the_same_inputs() -> None:
    assert texts("a  b") == (["a b"], False)
    assert texts({"text": "a  b"}) == (["a b"], False)
    many = ["a", "b", "c"]
    assert texts(many) == (many, True)
    assert texts([{"text": "a"}, "b", {"text": "c"}]) == (many, True)
    assert texts(pd.DataFrame({"text": many, "other": [1, 2, 3]})) == (many, True)
    assert texts(pa.table({"text": many})) == (many, True)


def test_error_gives_the_position_of_a_bad_text() -> None:
    with pytest.raises(CellError, match=r"^rows\[2\]\.text: the text is missing"):
        texts(["a", "b", " "])
    with pytest.raises(CellError, match=r"^rows\[1\]\.text: the text is missing"):
        texts(pd.DataFrame({"text": ["a", None]}))
    with pytest.raises(DataError, match="row 1 is int, expected a text or a dict"):
        texts(["a", 3])
    with pytest.raises(DataError, match="the item is str, expected a dict with title, text"):
        texts("a", TWO)
    with pytest.raises(DataError, match="found bytes, expected a text"):
        texts(b"a")


def test_text_table_has_inputs_for_good_rows_and_faults_for_bad_ones() -> None:
    table = pa.table({"text": ["a", None, "", "b" * 101, "c"]})
    read = read_text_table(table, ONE)
    assert read.positions.tolist() == [0, 4]
    assert {row: fault.rule for row, fault in read.faults.items()} == {
        1: "missing_value",
        2: "missing_value",
        3: "out_of_range",
    }
    assert [decode_row(row, ONE) for row in read.inputs] == ["a", "c"]


def test_numbers_in_a_column_of_texts_are_read_as_in_training() -> None:
    assert [
        decode_row(row, ONE) for row in read_text_table(pa.table({"text": [1.0, 2.5]}), ONE).inputs
    ]
    read = read_text_table(pa.table({"text": np.array([7, 8])}), ONE)
    assert [decode_row(row, ONE) for row in read.inputs] == ["7", "8"]


def test_error_suggests_the_similar_column_if_the_text_column_is_missing() -> None:
    with pytest.raises(DataError, match=r"no column 'text' \(there is 'Text'\)"):
        read_text_table(pa.table({"Text": ["a"]}), ONE)
