"""Tests of boosted trees: reproducible bytes, early stopping, weights and refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slipway.system.errors import TrainingError
from tests.training.trees.fitted import ARGUMENTS, fitted, packed


def test_trees_predict_a_numeric_target_in_its_unit(tmp_path: Path) -> None:
    network, _, data = fitted(packed(tmp_path), epochs=60)
    with torch.inference_mode():
        found = network(torch.from_numpy(np.array(data.val.inputs))).numpy()[:, 0]
    error = np.sqrt(np.mean((found - data.val.targets) ** 2))
    assert error < 0.5 * data.val.targets.std()


def test_equal_seeds_give_equal_model_text_on_any_number_of_threads(tmp_path: Path) -> None:
    data = packed(tmp_path)
    one, two = (fitted(data, threads=threads).trees.text for threads in (1, 2))
    assert one == two
    assert fitted(data, seed=8).trees.text != one


def test_stored_trees_do_not_contain_lightgbms_settings(tmp_path: Path) -> None:
    text = fitted(packed(tmp_path)).trees.text
    assert text.startswith("tree\nversion=v4")
    assert "parameters" not in text


def test_logged_metrics_of_a_round_equal_those_of_a_network_with_its_trees(tmp_path: Path) -> None:
    for task in ("table_regression", "table_classification"):
        network, trees, data = fitted(packed(tmp_path / task, task), keep="last")
        with torch.inference_mode():
            answers = network(torch.from_numpy(np.array(data.val.inputs)))
        targets = torch.tensor(data.val.targets)
        if task == "table_regression":
            expected = float(((answers[:, 0] - targets) ** 2).mean().sqrt())
            assert trees.history[-1]["val/rmse"] == pytest.approx(expected, rel=1e-5)
        else:
            loss = torch.nn.functional.cross_entropy(answers, targets.long())
            assert trees.history[-1]["val/loss"] == pytest.approx(float(loss), rel=1e-5)


def test_boosting_stops_early_and_keeps_the_trees_up_to_the_best_round(tmp_path: Path) -> None:
    data = packed(tmp_path)
    _, trees, _ = fitted(data, epochs=400, early_stopping_patience=5, learning_rate=0.3)
    losses = [metrics["val/loss"] for metrics in trees.history]
    assert trees.kept_round == 1 + losses.index(min(losses))
    assert len(losses) == trees.kept_round + 5 < 400
    assert trees.text.count("\nTree=") == trees.kept_round


def test_class_weights_change_the_fitted_trees(tmp_path: Path) -> None:
    data = packed(tmp_path, "table_classification")
    plain, weighted = (
        fitted(data, class_weights=weights).trees.text for weights in (None, {"high": 5, "low": 1})
    )
    assert plain != weighted


def test_row_weights_that_are_all_equal_do_not_change_the_fitted_trees(tmp_path: Path) -> None:
    one, three = (
        fitted(packed(tmp_path / str(weight), weight=weight)).trees.text for weight in (1.0, 3.0)
    )
    assert one == three


def test_rows_without_any_possible_split_are_refused_with_the_argument_to_lower(
    tmp_path: Path,
) -> None:
    with pytest.raises(TrainingError, match="Lower min_data_in_leaf"):
        fitted(packed(tmp_path), network_arguments=ARGUMENTS | {"min_data_in_leaf": 300})


def test_column_gains_are_fractions_with_the_sum_one(tmp_path: Path) -> None:
    gains = fitted(packed(tmp_path)).network.column_gains()
    assert set(gains) == {"size", "age", "tail", "place", "b_garden"}
    assert sum(gains.values()) == pytest.approx(1)
    assert max(gains, key=lambda name: gains[name]) == "size"
