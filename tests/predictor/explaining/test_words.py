"""Words of a text, and copies that lack one."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipway.inputs.texts import TextContract, decode_row, encode_texts
from slipway.predictor.explaining.explanation import (
    ExplainedOutput,
    explain_text,
    without_each,
    words_of,
)
from tests.tokens import token_contract

pytestmark = pytest.mark.unit
CONTRACT = TextContract(kind="texts", columns=["text"], max_bytes=64, max_characters=None)


def test_words_keep_trailing_space_and_each_chinese_character_is_a_word() -> None:
    assert words_of("see you, \u5f88\u597d now", 100) == [
        "see ",
        "you, ",
        "\u5f88",
        "\u597d ",
        "now",
    ]


@given(st.text(max_size=60), st.integers(1, 8))
def test_pieces_join_to_the_text_and_respect_the_limit(text: str, most: int) -> None:
    pieces = words_of(text, most)
    assert "".join(pieces) == text
    assert 1 <= len(pieces) <= most


def test_each_copy_of_the_text_lacks_one_word() -> None:
    copies = without_each(["a ", "b ", "c"], CONTRACT)
    assert [decode_row(row, CONTRACT) for row in copies] == ["b c", "a c", "a b "]


def test_a_copy_without_the_last_word_of_a_column_keeps_the_columns_apart() -> None:
    copies = without_each(["a ", "b\n", "c"], CONTRACT)
    assert [decode_row(row, CONTRACT) for row in copies] == ["b\nc", "a \nc", "a b\n"]


@pytest.mark.parametrize("contract", [CONTRACT, token_contract(max_tokens=64)])
def test_the_word_that_a_model_looks_at_has_the_largest_change(contract: TextContract) -> None:
    async def answers_free(rows: NDArray[Any]) -> NDArray[np.float32]:
        found = [[0.9 if "free" in decode_row(row, contract) else 0.1] for row in rows]
        return np.array(found, np.float32)

    (row,) = encode_texts(["call for a free prize"], contract)
    explained = ExplainedOutput(answers_free, 0, np.array([0.9], np.float32))
    answer = asyncio.run(explain_text(explained, row, contract, most_rows=64))
    changes = {each["text"]: each["change"] for each in answer["words"]}
    assert changes.pop("free ") == pytest.approx(0.8)
    assert list(changes.values()) == pytest.approx([0.0] * 4)
    assert explained.num_rows == 5
