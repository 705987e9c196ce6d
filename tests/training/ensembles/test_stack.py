"""Tests of stacking: weights equal those of least squares, and a planted leak is detected."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from slipway.data.store.packed import PackedSplit, TargetScale
from slipway.system.errors import TrainingError
from slipway.training.batches.row_selection import select
from slipway.training.distributed.placement import TrainingHost, place, requested_setup
from slipway.training.ensembles.stack import refuse_leak, stack_folds, stacked_weights
from slipway.training.ensembles.weights import ValidationMeasure
from slipway.training.job import TrainingData, network_spec, placed
from slipway.training.uncertainty.out_of_fold import FoldTraining, predict_out_of_fold
from slipway.training.uncertainty.prediction import predict_logits
from tests.training.trees.fitted import ARGUMENTS, packed, tree_params

NUM_ROWS = 2000


def test_stacked_weights_for_a_numeric_target_equal_those_of_least_squares() -> None:
    generator = np.random.default_rng(0)
    targets = 50_000 + 1000 * generator.normal(size=NUM_ROWS)
    answers = np.stack(
        [targets + 300 + scale * generator.normal(size=NUM_ROWS) for scale in (200, 400)], axis=1
    )
    exact = torch.from_numpy(targets)
    found = stacked_weights(
        torch.from_numpy(answers)[:, :, None],
        lambda given: ((given[:, 0] - exact) / 1000) ** 2,
        TargetScale(mean=50_000, std=1000),
    )
    inputs = np.column_stack([answers, np.ones(NUM_ROWS)])
    first, second, constant = np.linalg.lstsq(inputs, targets, rcond=None)[0]
    assert found.weights == pytest.approx([first, second], abs=0.01)
    errors = inputs @ [*found.weights, *found.bias] - targets
    least = inputs @ [first, second, constant] - targets
    assert np.mean(errors**2) < 1.001 * np.mean(least**2)


def test_a_useless_classifier_gets_almost_no_weight_in_a_stack() -> None:
    torch.manual_seed(0)
    logits = torch.randn(NUM_ROWS, 3) * 2
    targets = torch.multinomial(logits.softmax(dim=1), 1)[:, 0]
    answers = torch.stack([logits, torch.randn(NUM_ROWS, 3)], dim=1)

    def losses(given: Tensor) -> Tensor:
        return F.cross_entropy(given, targets, reduction="none")

    found = stacked_weights(answers, losses, None)
    assert found.weights == pytest.approx([1.0, 0.0], abs=0.15)


def test_the_stack_fold_of_a_row_depends_only_on_its_id_and_the_seed() -> None:
    keys = np.random.default_rng(1).integers(0, 2**63, NUM_ROWS).astype(np.uint64)
    folds = stack_folds(keys, 4, 7)
    assert np.array_equal(folds[::-1], stack_folds(keys[::-1], 4, 7))
    assert not np.array_equal(folds, stack_folds(keys, 4, 8))
    assert np.bincount(folds).min() > NUM_ROWS / 5


def noisy(split: PackedSplit, seed: int) -> PackedSplit:
    noise = np.random.default_rng(seed).normal(size=len(split)) * split.targets.std()
    return replace(split, targets=split.targets + noise)


def losses_out_of_fold(
    data: TrainingData, folds: NDArray[np.int64], folder: Path
) -> tuple[Tensor, Tensor]:
    """Return the losses of trees that memorise, for rows out of fold and for unseen rows."""
    params = tree_params(
        epochs=60, network_arguments=ARGUMENTS | {"num_leaves": 200, "min_data_in_leaf": 1}
    )
    host = TrainingHost(num_gpus=0, has_bfloat16=True, launch=None)
    training = FoldTraining(
        7, params, requested_setup(params), place(placed(params), host), data, folds, "key"
    )
    answers = torch.from_numpy(predict_out_of_fold(training, folder, predict_logits))
    rows, num_val = training.rows(), len(data.val)
    found = ValidationMeasure(params, network_spec(params, data.manifest), rows).losses(answers)
    return found[:-num_val], found[-num_val:]


@pytest.mark.process
def test_row_copies_in_other_folds_are_detected_as_a_leak(tmp_path: Path) -> None:
    data = packed(tmp_path)
    train, val = noisy(data.train[0], 1), noisy(data.val, 2)
    twice = select([train], np.tile(np.arange(len(train)), 2), tuple(train.inputs.shape[1:]))
    honest = np.arange(len(train)) % 2
    of_val = np.arange(len(val)) % 2
    leaking = replace(data, train=[twice], val=val)
    planted = np.concatenate([honest, 1 - honest, of_val])  # a copy is never in its row's fold
    with pytest.raises(TrainingError, match=r"trees has the loss .* out of fold, far below"):
        refuse_leak("trees", *losses_out_of_fold(leaking, planted, tmp_path / "leak"))
    together = np.concatenate([honest, honest, of_val])
    refuse_leak("trees", *losses_out_of_fold(leaking, together, tmp_path / "none"))
