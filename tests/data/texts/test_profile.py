"""Tests of the profile of texts: scripts, typical words, and passages that only one class has."""

import numpy as np
import pytest

from slipway.data.texts.profile import (
    SAMPLE_CHARACTERS,
    SampledText,
    sampled,
    shared_passages,
    telling_terms,
)
from slipway.data.texts.scripts import NO_SCRIPT, main_script

pytestmark = pytest.mark.unit
SIGNATURE = "sent by the hotline of the bank"


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("Hello", "Latin"),
        ("na\u00efve caf\u00e9", "Latin"),
        ("12:30 !", NO_SCRIPT),
        ("\U0001f600\u200d", NO_SCRIPT),
        ("", NO_SCRIPT),
        ("\u041f\u0440\u0438\u0432\u0435\u0442, ok", "Cyrillic"),
        ("\u5f88\u597d\u5403 ok", "Han"),
        ("\u65e5\u672c\u8a9e\u306e\u672c", "Kana"),
        ("\ud55c\uad6d\uc5b4", "Hangul"),
        ("\u0645\u0631\u062d\u0628\u0627", "Arabic"),
        ("\u05e9\u05dc\u05d5\u05dd", "Hebrew"),
        ("\U00020000\U00020001 a", "Han"),
        ("\u0928\u092e\u0938\u094d\u0924\u0947", "Devanagari"),
    ],
)
def test_a_text_has_the_script_of_most_of_its_letters(text: str, script: str) -> None:
    assert main_script(text) == script


def texts(suffix: str = "") -> list[SampledText]:
    generator = np.random.default_rng(3)
    words = ["red", "green", "blue", "round", "flat", "heavy", "light", "old", "new"]
    found = []
    for row in range(400):
        name = ("fruit", "tool")[row % 2]
        own = ("apple", "hammer \u5f88\u597d")[row % 2] if row % 3 else "thing"
        mixed = generator.permutation([*generator.choice(words, 12), own])
        text = " ".join([*mixed, *generator.choice(words, 3)])
        found.append(SampledText(f"{text} {suffix}" if row % 10 == 1 else text, [name]))
    return found


def test_telling_terms_list_typical_words_of_a_class_first_and_common_words_not_at_all() -> None:
    terms = telling_terms(texts())
    assert terms["fruit"][0] == "apple"
    assert {"hammer", "\u5f88\u597d"} <= set(terms["tool"])
    assert not {"red", "green", "blue"} & {*terms["fruit"], *terms["tool"]}


def test_a_passage_of_only_one_class_is_found_whole_with_its_fraction_of_texts() -> None:
    (found,) = shared_passages(texts(SIGNATURE))
    assert found.of == "tool"
    assert found.fraction == pytest.approx(0.2)
    assert found.text.endswith(SIGNATURE)
    assert len(found.text) < len(SIGNATURE) + 10


def test_a_passage_that_both_classes_share_is_not_reported() -> None:
    every = [SampledText(f"{text} {SIGNATURE}", names) for text, names in texts()]
    assert shared_passages(every) == []
    assert shared_passages(texts()) == []
    assert shared_passages([]) == []


def test_a_profile_sample_is_bounded_and_truncates_long_texts() -> None:
    found = sampled(SampledText("x" * 10_000, ["a"]) for _ in range(10**6))
    assert sum(len(text) for text, _ in found) < SAMPLE_CHARACTERS + 10_000
