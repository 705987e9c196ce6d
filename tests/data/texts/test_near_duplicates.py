"""Tests of nearly equal texts: the estimated similarity, and the pairs that are found."""

import numpy as np
import pytest

from slipway.data.texts.near_duplicates import MIN_CHARACTERS, find_similar, signatures

pytestmark = pytest.mark.unit
LETTERS = {
    "latin": "abcdefghijklmnopqrstuvwxyz ",
    "han": "".join(map(chr, range(0x4E00, 0x4E00 + 400))),
    "arabic": "".join(map(chr, range(0x627, 0x64A))),
}


def random_texts(count: int, letters: str, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return ["".join(generator.choice(list(letters), 120)) for _ in range(count)]


def changed(text: str, places: int) -> str:
    """Return the text with single characters at evenly spaced places replaced."""
    letters = list(text)
    for place in np.linspace(5, len(text) - 5, places).astype(int):
        letters[place] = "#"
    return "".join(letters)


def jaccard(one: str, other: str) -> float:
    sets = [{text[i : i + 4] for i in range(len(text) - 3)} for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("letters", LETTERS.values(), ids=LETTERS)
def test_the_estimated_similarity_is_near_the_exact_jaccard_similarity(letters: str) -> None:
    texts = random_texts(40, letters)
    errors = []
    for text in texts:
        for places in (0, 2, 6, 12):
            other = changed(text, places) if places else text
            left, right = signatures([text, other])
            errors.append((left == right).mean() - jaccard(text, other))
    assert np.abs(np.mean(errors)) < 0.01
    assert np.std(errors) < 0.05


@pytest.mark.parametrize("letters", LETTERS.values(), ids=LETTERS)
def test_find_similar_finds_changed_copies_in_any_language_and_no_other_pair(letters: str) -> None:
    texts = random_texts(300, letters)
    copies = [changed(text, 2) for text in texts[:50]]
    every = [*texts, *copies]
    found = find_similar(len(every), lambda part: every[part], 0.7)
    assert found.pairs.tolist() == [[row, 300 + row] for row in range(50)]
    assert (found.correlations >= 0.7).all()


def test_the_signature_of_a_text_does_not_depend_on_the_next_text() -> None:
    one, other = random_texts(2, LETTERS["latin"])
    alone = np.concatenate([signatures([one]), signatures([other])])
    assert (signatures([one, other]) == alone).all()


def test_two_equal_texts_of_the_minimum_length_are_found() -> None:
    text = random_texts(1, LETTERS["latin"])[0][:MIN_CHARACTERS]
    found = find_similar(2, lambda part: [text, text][part], 1.0)
    assert found.pairs.tolist() == [[0, 1]]
    assert find_similar(0, lambda part: [], 0.7).pairs.shape == (0, 2)


def test_many_equal_texts_give_few_candidate_pairs() -> None:
    texts = random_texts(1, LETTERS["latin"]) * 2000
    found = find_similar(len(texts), lambda part: texts[part], 0.7)
    assert len(found.pairs) < 2 * len(texts)
