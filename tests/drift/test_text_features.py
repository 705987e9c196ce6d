"""Drift features of texts."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.drift.feature_reference import describe_features
from slipway.drift.text_features import VOCABULARY, measure_texts, text_features
from slipway.drift.two_sample_tests import mann_whitney
from slipway.drift.verdict import Budget
from slipway.inputs.texts import TextContract, encode_texts
from tests.tokens import token_contract

pytestmark = pytest.mark.unit
CONTRACT = TextContract(kind="texts", columns=["text"], max_bytes=32, max_characters=None)

LEVEL = Budget().level / 60  # of one of the 60 tests of a window


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


def test_links_and_truncated_texts_have_features() -> None:
    found = measured("see https://example.org/" + "x" * 40)
    assert found["links"] > 0
    assert found["truncated"] == 1
    assert measured("see you")["links"] == 0


def test_token_rows_have_the_features_of_their_text_and_their_number_of_tokens() -> None:
    contract = token_contract()
    names = [feature.name for feature in text_features(contract)]
    (values,) = measure_texts(contract, encode_texts(["AB c1!"], contract)).tolist()
    found = dict(zip(names, values, strict=True))
    of_bytes = {name: value for name, value in measured("AB c1!").items() if name not in VOCABULARY}
    assert {name: found[name] for name in of_bytes} == of_bytes
    num_tokens = np.exp(found["log_tokens"])
    assert num_tokens == pytest.approx(len(contract.loaded_tokenizer.encode("AB c1!").ids))
    assert found["characters_per_token"] == pytest.approx(6 / num_tokens)


def test_replacement_characters_are_counted() -> None:
    assert measured("a\ufffdb\ufffd")["replacement_characters"] == pytest.approx(0.5)
    assert measured("\u5f88\u597d ab")["replacement_characters"] == 0


def texts_of(words: list[str], num_rows: int, random: np.random.Generator) -> list[str]:
    """Draw texts of two to six words, a few of which are frequent."""
    share = 1 / np.arange(1, len(words) + 1)
    lengths = random.integers(2, 7, num_rows)
    drawn = random.choice(words, (num_rows, 6), p=share / share.sum())
    return [" ".join(row[:length]) for row, length in zip(drawn, lengths, strict=True)]


@pytest.mark.parametrize("contract", [CONTRACT, token_contract()], ids=["bytes", "tokens"])
def test_new_words_made_of_the_same_letters_alarm_and_the_old_words_do_not(
    contract: TextContract,
) -> None:
    random = np.random.default_rng(4)
    words = ["".join(random.choice(list("abcdefghij"), 5)) for _ in range(300)]
    others = ["".join(random.permutation(list(word))) for word in words]
    first = [feature.name for feature in text_features(contract)].index(VOCABULARY[0])

    def halves(vocabulary: list[str], num_rows: int) -> NDArray[np.float32]:
        texts = texts_of(vocabulary, num_rows, random)
        return measure_texts(contract, encode_texts(texts, contract))[:, first:]

    features = describe_features(text_features(contract)[first:], halves(words, 1000))
    assert len(features) == 4

    def p_values(values: NDArray[np.float32]) -> list[float]:
        """Of each feature in a window."""
        counts = [
            np.bincount(feature.bins(column), minlength=len(feature.counts))
            for feature, column in zip(features, values.T, strict=True)
        ]
        return [
            float(mann_whitney(own[:-1], feature.counts[:-1], 1e-4).p_values)
            for own, feature in zip(counts, features, strict=True)
        ]

    clean = np.array([p_values(halves(words, 200)) for _ in range(3)])
    assert clean.min() > LEVEL
    assert 0.2 < clean.mean() < 0.8
    assert min(p_values(halves(others, 400))) < LEVEL


def test_measuring_zero_rows_gives_an_empty_matrix() -> None:
    assert measure_texts(CONTRACT, np.empty((0, 32), np.uint8)).shape == (0, 14)
