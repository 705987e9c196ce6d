"""The label queue: choice of rows, labels of several people, conflicts and undo."""

from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slipway.traffic.label_queue import LabelQueue, QueuedRow, choose, gains
from slipway.traffic.selection import Content, Key, LoggedItem, _ambiguity

ROW = QueuedRow("a", 0, 1.0, by_gain=True)
OTHER = QueuedRow("b", 0, 2.0, by_gain=False)


def items(*ambiguities: float) -> list[LoggedItem]:
    return [
        LoggedItem((f"r{number}", 0, 1.0), "v", str(number), None, "x", 0, 0, False, False, one)
        for number, one in enumerate(ambiguities)
    ]


def chosen(
    found: list[LoggedItem], contents: list[Content], num_rows: int, fraction: float
) -> list[QueuedRow]:
    known = {item.key: content for item, content in zip(found, contents, strict=True)}

    def read(keys: set[Key]) -> dict[Key, Content]:
        return {key: known[key] for key in keys if key in known}

    return choose(found, read, num_rows, fraction, seed=3)


def smooth_picture(seed: int, kind: str) -> bytes:
    """Return an encoded image of a few large spots."""
    spots = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), np.uint8)
    out = BytesIO()
    Image.fromarray(spots).resize((90, 90)).save(out, kind)
    return out.getvalue()


def different(number: int) -> Content:
    return {"a": number, "b": 2 * number, "c": f"c{number}"}


def test_ambiguous_rows_are_preferred_for_labelling_but_not_only_the_most_ambiguous() -> None:
    found = items(*(number / 400 for number in range(400)))
    rows = chosen(found, [different(number) for number in range(400)], 100, 0.0)
    places = sorted(int(row.request_id[1:]) for row in rows)
    assert all(row.by_gain for row in rows)
    assert 290 < np.mean(places) < 345  # a weight of place**4; the best 100 have the mean 350
    assert places[0] < 300


def test_gain_of_a_label_is_the_ambiguity_of_classes_or_the_rank_of_ood_scores() -> None:
    answer = {"probabilities": {"a": 0.5, "b": 0.3, "c": 0.2}}
    assert _ambiguity(answer) == pytest.approx(0.8)
    assert _ambiguity(answer | {"labels": ["a"]}) == pytest.approx(1.0)
    (classified,) = items(0.8)
    numbers = [replace(classified, ambiguity=None, ood_score=score) for score in (7.0, 1.0, 5.0)]
    assert gains([classified]) == [0.8]
    assert gains(numbers) == pytest.approx([1.0, 1 / 3, 2 / 3])


def test_randomly_chosen_rows_ignore_the_gain_and_are_marked() -> None:
    entropies = [number / 400 for number in range(400)]
    rows = chosen(items(*entropies), [different(number) for number in range(400)], 200, 0.5)
    drawn = [entropies[int(row.request_id[1:])] for row in rows if not row.by_gain]
    assert len(drawn) == 100
    assert len({row.key for row in rows}) == 200
    assert sum(drawn) / 100 == pytest.approx(0.5, abs=0.09)  # 3 standard errors
    assert [row.by_gain for row in rows] != sorted(row.by_gain for row in rows)


@pytest.mark.parametrize("kind", ["texts", "cells", "images"])
def test_only_one_of_several_near_copies_is_chosen_for_labelling(kind: str) -> None:
    long = "the quick brown fox jumps over the lazy dog and does not stop at the river "
    contents: dict[str, list[Content]] = {
        "texts": [{"text": long}, {"text": long + "!"}, {"text": long[::-1]}],
        "cells": [
            {f"x{place}": place + 0.1 for place in range(20)},
            {f"x{place}": place + 0.1 + (place == 3) for place in range(20)},
            {f"x{place}": place + 0.9 for place in range(20)},
        ],
        "images": [smooth_picture(1, "PNG"), smooth_picture(1, "JPEG"), smooth_picture(2, "PNG")],
    }
    rows = chosen(items(0.9, 0.01, 0.0001), contents[kind], 2, 0.0)
    assert sorted(row.request_id for row in rows) == ["r0", "r2"]


def test_a_row_whose_content_has_expired_is_not_chosen() -> None:
    known = {("r1", 0, 1.0): different(1)}
    rows = choose(items(0.9, 0.8), lambda keys: dict(known), 2, 0.0)
    assert [row.request_id for row in rows] == ["r1"]


def test_one_label_decides_by_default_and_undo_reverts_it(tmp_path: Path) -> None:
    queue = LabelQueue(tmp_path / "q.sqlite")
    assert (queue.add([ROW, OTHER]), queue.add([ROW])) == (2, 0)
    assert queue.give(ROW, "anna", "x") == "x"
    assert queue.waiting("anna") == queue.waiting("ben") == [OTHER]
    assert queue.undo("ben") is None
    assert queue.undo("anna") == (ROW, None)
    assert queue.waiting("anna") == [ROW, OTHER]
    assert (tmp_path / "q.sqlite").stat().st_mode & 0o077 == 0


def test_a_row_that_one_labeller_skipped_is_shown_to_others(tmp_path: Path) -> None:
    queue = LabelQueue(tmp_path / "q.sqlite")
    queue.add([ROW])
    assert queue.give(ROW, "anna", None) is None
    assert (queue.waiting("anna"), queue.waiting("ben")) == ([], [ROW])


def test_two_different_labels_need_a_third_and_three_different_ones_conflict(
    tmp_path: Path,
) -> None:
    queue = LabelQueue(tmp_path / "q.sqlite", opinions=2)
    queue.add([ROW, OTHER])
    for row in (ROW, OTHER):
        assert queue.give(row, "anna", "x") is None
        assert queue.give(row, "ben", "y") is None
    assert queue.waiting("ben") == []
    assert queue.waiting("cleo") == [ROW, OTHER]
    assert queue.give(ROW, "cleo", "y") == "y"
    assert queue.decided() == [(ROW, "y", "cleo")]
    assert queue.give(OTHER, "cleo", "z") is None
    assert queue.waiting("dan") == []
    assert queue.conflicts() == [(OTHER, {"anna": "x", "ben": "y", "cleo": "z"})]
    assert queue.remove({"b": None, "c": None}) == 1
    assert queue.conflicts() == []
