"""Tests of out-of-fold predictions of boosted trees."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from slipway.training.distributed.placement import TrainingHost, place, requested_setup
from slipway.training.job import placed
from slipway.training.uncertainty.out_of_fold import FoldTraining, predict_out_of_fold
from tests.training.trees.fitted import ROWS, packed, tree_params


def test_each_fold_is_predicted_by_trees_fitted_for_all_rounds_without_its_rows(
    tmp_path: Path,
) -> None:
    data = packed(tmp_path, "table_classification")
    params = tree_params(epochs=20, early_stopping_patience=1)
    host = TrainingHost(num_gpus=0, has_bfloat16=True, launch=None)
    folds = np.arange(ROWS["train"] + ROWS["val"]) % 3
    training = FoldTraining(
        7, params, requested_setup(params), place(placed(params), host), data, folds, "key"
    )
    answers = predict_out_of_fold(training, tmp_path)
    targets = training.rows().targets
    assert answers.shape == (len(folds), 2)
    assert np.allclose(answers.sum(axis=1), 1)
    assert 0.8 < (answers.argmax(axis=1) == targets).mean() < 1  # unseen rows, some of them wrong
    assert sorted(path.name for path in tmp_path.glob("fold-*.npy")) == [
        f"fold-{fold}.npy" for fold in range(3)
    ]
    short, few = replace(training, num_epochs=2), tree_params(epochs=2)
    found = predict_out_of_fold(short, tmp_path / "short")
    expected = predict_out_of_fold(replace(training, params=few), tmp_path / "few")
    assert np.array_equal(found, expected)  # as a member that stopped early
    assert not np.array_equal(found, answers)
