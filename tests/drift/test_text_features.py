"""Drift features of texts."""

import numpy as np
import pytest

from slipway.drift.text_features import measure_texts, text_features
from slipway.inputs.texts import TextContract, encode_texts
from tests.tokens import token_contract

pytestmark = pytest.mark.unit
CONTRACT = TextContract(kind="texts", columns=["text"], max_bytes=32, max_characters=None)


def measured(text: str) -> dict[str, float]:
    names = [feature.name for feature in text_features(CONTRACT)]
    (values,) = measure_texts(CONTRACT, encode_texts([text], CONTRACT)).tolist()
    return dict(zip(names, values, strict=True))


def test_characters_are_counted_by_kind_whatever_their_bytes() -> None:
    found = measured("AB c1! \u00e9\u5f88")
    assert np.exp(found["log_characters"]) == pytest.approx(9)
    assert found["mean_word_characters"] == pytest.approx(7 / 3)
    fractions = {name: found[name] * 9 for name in ("upper_case", "digits", "punctuation")}
    assert fractions == pytest.approx({"upper_case": 2, "digits": 1, "punctuation": 1})
    assert found["beyond_ascii"] * 9 == pytest.approx(2)
    assert found["three_byte_characters"] * 9 == pytest.approx(1)
    assert found["truncated"] == 0


def test_links_and_cut_texts_are_seen() -> None:
    found = measured("see https://example.org/" + "x" * 40)
    assert found["links"] > 0
    assert found["truncated"] == 1
    assert measured("see you")["links"] == 0


def test_tokens_have_the_features_of_their_text_and_how_many_there_are() -> None:
    contract = token_contract()
    names = [feature.name for feature in text_features(contract)]
    (values,) = measure_texts(contract, encode_texts(["AB c1!"], contract)).tolist()
    found = dict(zip(names, values, strict=True))
    assert {name: found[name] for name in measured("AB c1!")} == measured("AB c1!")
    num_tokens = np.exp(found["log_tokens"])
    assert num_tokens == pytest.approx(len(contract.loaded_tokenizer.encode("AB c1!").ids))
    assert found["characters_per_token"] == pytest.approx(6 / num_tokens)


def test_no_rows_have_no_features() -> None:
    assert measure_texts(CONTRACT, np.empty((0, 32), np.uint8)).shape == (0, 9)
