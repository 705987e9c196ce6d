"""Tests of reading label sets: lists, JSON lists, separated text, and true/false columns."""

from typing import Any

import pyarrow as pa
import pytest

from slipway.artifacts.label_sets import labels_in, named_label, set_text
from slipway.data.engine.label_sets import (
    is_given,
    label_counts,
    meant_labels,
    membership,
    read_labels,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("cell", "labels"),
    [
        (["b", "a"], ["b", "a"]),
        ([], []),
        ("a|b", ["a", "b"]),
        (" a | b ", ["a", "b"]),
        ("a", ["a"]),
        ('["a, b", "c|d"]', ["a, b", "c|d"]),
        ("[]", []),
        ([1, 2.0], ["1", "2"]),
        (3.0, ["3"]),
    ],
)
def test_every_notation_of_labels_in_a_cell_is_read(cell: Any, labels: list[str]) -> None:
    assert read_labels(cell, "|") == labels


@pytest.mark.parametrize("cell", ["a||b", ["a", ""], '["a"', ["a", None], [["a"]], [True]])
def test_a_cell_with_anything_but_labels_is_refused(cell: Any) -> None:
    with pytest.raises(ValueError, match=r"empty label|JSON list|not a label"):
        read_labels(cell, "|")


def test_equal_label_sets_have_equal_texts_in_any_order_and_language() -> None:
    assert set_text(["b", "a", "a"]) == set_text(["a", "b"]) == '["a", "b"]'
    assert labels_in(set_text(["猫", 'a "b"'])) == ['a "b"', "猫"]
    assert named_label({"labels": ["b", "a"]}) == '["a", "b"]'
    assert named_label({"label": "a"}) == "a"
    assert named_label({"value": 1.0}) is None


def test_mapped_and_repeated_labels_are_recorded_as_corrections() -> None:
    assert meant_labels(["Cat", "dog"], {"Cat": "cat"}) == (["cat", "dog"], ("label: Cat -> cat",))
    labels, changes = meant_labels(["cat", "cat"], {})
    assert (labels, changes) == (["cat", "cat"], ("label: cat twice -> once",))


@pytest.mark.parametrize(
    ("cell", "given"), [("yes", True), (1, True), (0.0, False), (False, False)]
)
def test_a_label_column_accepts_words_for_true_and_false(cell: Any, given: bool) -> None:
    assert is_given(cell) is given
    with pytest.raises(ValueError, match="maybe"):
        is_given("maybe")


def test_label_sets_are_counted_and_converted_to_a_matrix_of_0_and_1() -> None:
    texts = pa.chunked_array([[set_text(["a", "b"]), set_text([]), set_text(["b"])]])
    assert label_counts(texts) == {"a": 1, "b": 2}
    assert membership(texts, ["a", "b"]).tolist() == [[1, 1], [0, 0], [0, 1]]
