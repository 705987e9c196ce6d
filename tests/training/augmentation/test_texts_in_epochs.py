"""Tests of the words and tokens that training drops: a pure function of seed, epoch and id."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.data.augmentation.plan import AugmentPlan, plan_from_params
from slipway.inputs.texts import TextContract, decode_row, encode_texts
from slipway.training.augmentation.host import without_tokens, without_words
from slipway.training.batches.batches import TextChanges, TrainingBatches, cut_step
from tests.packed_rows import packed_split
from tests.project_params import augment_params
from tests.sentences import sentences
from tests.tokens import token_contract

pytestmark = pytest.mark.unit
BYTES = TextContract(kind="texts", columns=["text"], max_bytes=24, max_characters=None)
KEYS = np.arange(40, dtype=np.uint64)


def plan(seed: int = 7, **values: float) -> AugmentPlan:
    return plan_from_params(augment_params(**values), seed)


def drawn(*rows: list[float], length: int = 24) -> NDArray[np.float64]:
    """Return the random numbers of each row; positions beyond the given ones have 0.99."""
    return np.array([row + [0.99] * (length - len(row)) for row in rows])


def test_words_with_a_number_below_the_fraction_are_dropped_with_the_space_after_them() -> None:
    rows = encode_texts(["one two three", "a\nb c", "\u5f88\u597d", "lost words"], BYTES)
    numbers = drawn([0.9, 0.1, 0.9], [0.1, 0.1, 0.9], [0.0], [0.1, 0.2])
    shown = [decode_row(row, BYTES) for row in without_words(rows, numbers, 0.5)]
    assert shown == ["one three", "\nc", "\u5f88\u597d", "words"]


def test_dropping_words_keeps_the_mark_of_a_truncated_text() -> None:
    rows = encode_texts(["some words that are far too long"], BYTES)
    changed = without_words(rows, drawn([0.1]), 0.5)
    assert decode_row(changed[0], BYTES) == "words that are far"
    assert changed.dtype == np.uint8


def test_augmentation_never_drops_the_ends_or_the_separator_of_tokens() -> None:
    rows = np.array([[3, 9, 4, 8, 7, 4, 0, 0], [-3, 4, 0, 0, 0, 0, 0, 0]], np.int32)
    none = np.zeros(rows.shape)
    assert without_tokens(rows, none, 0.5, 3).tolist() == [
        [3, 4, 4, 0, 0, 0, 0, 0],
        [-3, 4, 0, 0, 0, 0, 0, 0],
    ]
    assert (without_tokens(rows, none + 0.5, 0.5, None) == rows).all()


@pytest.mark.parametrize("has_tokens", [False, True], ids=["bytes", "tokens"])
def test_word_dropping_meets_its_fraction_and_empties_no_text(*, has_tokens: bool) -> None:
    contract = (
        token_contract(max_tokens=64, max_bytes=512)
        if has_tokens
        else BYTES.model_copy(update={"max_bytes": 512})
    )
    texts = [text for _, text in sentences(400, seed=2)]
    rows = encode_texts(texts, contract)
    changes = TextChanges(plan(token_dropout=0.3) if has_tokens else plan(word_deletion=0.3), None)
    keys = np.arange(len(texts), dtype=np.uint64) * np.uint64(2**40)
    changed = changes.apply(rows, 2, keys)
    assert (changed[:, 0] != 0).all()
    left = np.count_nonzero(changed) / np.count_nonzero(rows)
    assert 0.65 < left < 0.78


def batches(world_size: int, rank: int, seed: int = 7) -> TrainingBatches:
    texts = [text for _, text in sentences(64, seed=2)]
    ids = [f"{number * 7919:032x}" for number in range(64)]
    split: Any = packed_split(encode_texts(texts, BYTES), np.zeros(64, int), ids, ids)
    changes = TextChanges(plan(seed, word_deletion=0.4), None)
    shape = cut_step(16, world_size, 4)
    return TrainingBatches([split], shape, rank, 7, None, "int64", texts=changes)


def seen(world_size: int, epoch: int, seed: int = 7) -> dict[int, bytes]:
    """Return the text of each row in one epoch, by row."""
    found = {}
    for rank in range(world_size):
        own = batches(world_size, rank, seed)
        for index in range(len(own)):
            batch = own[epoch, index]
            for row, text in zip(batch.rows.tolist(), batch.inputs.numpy(), strict=True):
                found[row] = text.tobytes()
    return found


def test_each_epoch_drops_other_words_of_a_text_but_the_same_on_any_number_of_processes() -> None:
    assert seen(1, 3) == seen(2, 3) == seen(4, 3)
    assert seen(1, 3) != seen(1, 4)
    assert seen(1, 3) != seen(1, 3, seed=8)
