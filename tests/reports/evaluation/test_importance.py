"""Permutation importance finds the column that answers depend on, with few answers."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.inputs.columns import ColumnContract
from slipway.kinds.registry import Task
from slipway.reports.evaluation.importance import ColumnImportance, permutation_importance
from slipway.reports.pages.sections.importance import importance_section
from tests.packed_rows import packed_split
from tests.packed_tables import fit_column

Rows = NDArray[np.float32]
CONTRACT = ColumnContract(
    kind="columns",
    columns=[
        fit_column("noise", [0.0, 1.0, 2.0]),
        fit_column("signal", [0.0, 1.0, None]),
        fit_column("colour", ["red", "blue"]),
    ],
)


def manifest(task: Task) -> PackedManifest:
    return PackedManifest(
        format_version=3,
        task=task,
        input=CONTRACT,
        classes=[],
        mean=[],
        std=[],
        target_scale=None,
        splits={},
    )


def random_rows(num_rows: int) -> PackedSplit:
    generator = np.random.default_rng(0)
    block = generator.normal(size=(num_rows, 4)).astype(np.float32)
    names = [f"{row:032x}" for row in range(num_rows)]
    return packed_split(block, 3 * block[:, 1].astype(float), names, names)


def answer(rows: Rows) -> Rows:
    return 3 * rows[:, 1:2]


def measured(num_rows: int = 300) -> list[ColumnImportance]:
    return permutation_importance(manifest("table_regression"), random_rows(num_rows), answer, 7)


def test_only_the_column_that_the_answers_depend_on_is_important() -> None:
    first, *others = measured()
    assert first.column == "signal"
    # Shuffling makes the difference of two independent values: 3 * sqrt(2).
    assert first.loss == pytest.approx(3 * 2**0.5, rel=0.15)
    assert first.low <= first.loss <= first.high
    assert [(one.column, one.loss) for one in others] == [("colour", 0.0), ("noise", 0.0)]


def test_the_value_and_the_indicator_of_a_column_are_shuffled_together() -> None:
    seen = []

    def record(rows: Rows) -> Rows:
        seen.append(rows.copy())
        return answer(rows)

    split = random_rows(50)
    permutation_importance(manifest("table_regression"), split, record, 7)
    pairs = {tuple(row) for row in split.inputs[:, [1, 2]].tolist()}
    signal = seen[2]
    assert {tuple(row) for row in signal[:, [1, 2]].tolist()} == pairs
    assert (signal[:50, [0, 3]] == split.inputs[:, [0, 3]]).all()
    assert (signal[:50, 1] != split.inputs[:, 1]).any()


def test_importance_is_the_same_in_each_run_and_uses_a_bounded_number_of_rows() -> None:
    assert measured(3000) == measured(3000)
    assert measured(3000)[0].rows == 1000


def test_the_importance_of_a_classifier_is_a_loss_of_accuracy() -> None:
    split = random_rows(200)
    is_high = (split.targets > 0).astype(float)
    classes = packed_split(split.inputs, is_high, split.ids, split.sources)

    def probabilities(rows: Rows) -> Rows:
        high = (rows[:, 1:2] > 0).astype(np.float32)
        return np.concatenate([1 - high, high], axis=1)

    first = permutation_importance(manifest("table_classification"), classes, probabilities, 7)[0]
    assert first.column == "signal"
    assert first.loss == pytest.approx(0.5, abs=0.1)


def test_the_section_draws_and_lists_every_column_and_states_the_rows() -> None:
    text = importance_section(measured(), "RMSE")
    assert text.count('class="group"') == 3
    assert text.count("<tr>") == 4
    assert "300 test rows" in text


def test_the_section_lists_the_gain_of_each_column_only_for_trees() -> None:
    manifest_, split = manifest("table_regression"), random_rows(50)
    trees = permutation_importance(
        manifest_, split, answer, 7, gains={"signal": 0.75, "noise": 0.25}
    )
    assert {one.column: one.gain for one in trees}["signal"] == 0.75
    assert "75.0%" in importance_section(trees, "RMSE")
    assert "gain" not in importance_section(measured(), "RMSE").lower()
