"""Tests of a training step: its loss, weights, mixed images and non-finite values."""

from typing import Any

import pytest
import torch

from slipway.config.params import load_params
from slipway.data.augmentation.plan import plan_from_params
from slipway.data.store.packed import TargetScale
from slipway.training.batches.batches import Batch, ImageChanges, Mixing, TrainingBatches, cut_step
from slipway.training.module import EpochSums, PipelinedModule, TrainingModule, _derived_seed
from slipway.training.networks.networks import NetworkSpec, build_network
from tests.project_params import augment_params
from tests.training.conftest import ROOT, spec, split_of

SPLIT = split_of(24)


def _module(
    of: NetworkSpec | None = None,
    mean_weight: float = 1.0,
    model_parallel: int = 1,
    kind: type[TrainingModule] = TrainingModule,
    **changes: Any,
) -> TrainingModule:
    params = load_params(ROOT / "params.yaml").train.model_copy(update=changes)
    torch.manual_seed(0)
    return kind(
        build_network(of or spec()),
        params,
        seed=3,
        steps_per_epoch=5,
        ids=SPLIT.ids,
        mean_weight=mean_weight,
        model_parallel=model_parallel,
    )


def _batches() -> TrainingBatches:
    return TrainingBatches(
        [SPLIT], cut_step(8, 1, 8), 0, seed=3, changes=None, target_dtype="int64"
    )


def test_repeating_a_batch_repeats_its_dropout() -> None:
    module, batches = _module(), _batches()
    first, again, other = (
        float(module.training_step(batches[0, index], index).detach()) for index in (0, 0, 1)
    )
    assert first == again != other


def test_ranks_that_share_a_copy_of_the_network_draw_the_same_dropout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = _batches()[0, 0]

    def losses(model_parallel: int) -> list[float]:
        module, found = _module(model_parallel=model_parallel), []
        for rank in range(4):
            monkeypatch.setattr(TrainingModule, "global_rank", rank)
            found.append(float(module.training_step(batch, 0).detach()))
        return found

    first, second, third, fourth = losses(model_parallel=2)
    assert first == second != third == fourth
    assert len(set(losses(model_parallel=1))) == 4


def test_stages_of_a_pipeline_and_its_copies_draw_different_dropout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Stages compute different blocks, whose masks would be equal if they drew the same numbers.
    module, batch = _module(model_parallel=2, kind=PipelinedModule), _batches()[0, 0]
    drawn = []
    for rank in [*range(4), 0]:
        monkeypatch.setattr(TrainingModule, "global_rank", rank)
        module._start_batch(batch, 0)
        drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 4
    assert drawn[0] == drawn[-1]


def test_dropout_differs_by_batch_epoch_and_rank() -> None:
    module, batch = _module(), _batches()[0, 0]
    losses = [float(module.training_step(batch, index).detach()) for index in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]  # the same rows
    seeds = {
        _derived_seed(3, epoch, number, rank)
        for epoch in range(3)
        for number in range(3)
        for rank in range(3)
    }
    assert len(seeds) == 27


@pytest.mark.parametrize("task", ["image_classification", "image_regression"])
def test_the_loss_of_a_mixed_image_weights_its_two_targets_by_their_fractions(task: str) -> None:
    scale = TargetScale(mean=0.0, std=2.0)
    module = (
        _module()
        if task == "image_classification"
        else _module(of=spec(task=task, classes=[], target_scale=scale))
    )
    batch = _batches()[0, 0]
    targets = batch.targets if task == "image_classification" else batch.targets.float()
    own, partners = targets, 1 - targets
    answers = torch.randn(8, 2 if task == "image_classification" else 1)
    shares = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 0.1, 0.2, 0.3])
    mixed = batch._replace(targets=own, mixing=Mixing(partners, shares))
    expected = shares * module._losses(answers, own) + (1 - shares) * module._losses(
        answers, partners
    )
    assert torch.allclose(module._losses(answers, own, mixed.mixing), expected)
    assert torch.equal(module._losses(answers, own, None), module._losses(answers, own))
    assert not torch.allclose(expected, module._losses(answers, own))


def test_a_training_step_uses_the_pixels_and_both_targets_of_mixed_images() -> None:
    plan = plan_from_params(augment_params(mixup_alpha=1.0), seed=3)
    module, losses = _module(dropout=0.0), []
    for on_device in (False, True):
        changes = ImageChanges(plan, 8, on_device)
        batches = TrainingBatches(
            [SPLIT], cut_step(8, 1, 8), 0, seed=3, changes=changes, target_dtype="int64"
        )
        losses.append(float(module.training_step(batches[0, 0], 0).detach()))
    assert losses[0] == pytest.approx(
        losses[1], rel=0.02
    )  # on the host and on the device, which round differently
    assert losses[0] != pytest.approx(
        float(module.training_step(_batches()[0, 0], 0).detach()), rel=0.001
    )


def test_row_weights_of_one_change_no_bit_of_the_loss() -> None:
    module, batch = _module(), _batches()[0, 0]
    found = module.training_step(batch, 0)
    torch.manual_seed(_derived_seed(3, 0, 0, 0))
    assert torch.equal(found, module._losses(module.network(batch.inputs), batch.targets).mean())
    assert not torch.equal(
        found, module.training_step(batch._replace(weights=batch.weights * 1.0001), 0)
    )


def test_the_loss_of_a_row_is_multiplied_by_its_row_weight() -> None:
    module, batch = _module(mean_weight=2.0), _batches()[0, 0]
    module.network.backbone.register_forward_hook(
        lambda *_: torch.tensor([[float(row), 0.0] for row in range(8)])
    )
    weights = torch.tensor([0.0, 1.0, 3.0, 4.0, 0.0, 2.0, 2.0, 4.0])
    losses = module._losses(module.network(batch.inputs), batch.targets)
    weighted = module.training_step(batch._replace(weights=weights), 0)
    assert torch.allclose(weighted, (losses * weights / 2.0).mean())
    assert not torch.allclose(weighted, losses.mean())


def _part(batch: Batch, rows: slice) -> Batch:
    return Batch(
        batch.inputs[rows],
        batch.targets[rows],
        batch.weights[rows],
        batch.counted[rows],
        batch.rows[rows],
        None,
        None,
    )


def test_the_weighted_loss_is_the_same_for_any_process_layout() -> None:
    module, batch = _module(mean_weight=2.0), _batches()[0, 0]
    module.network.backbone.register_forward_hook(lambda _, inputs, __: inputs[0].flatten(1)[:, :2])
    batch = batch._replace(weights=torch.arange(8.0))
    halves = [_part(batch, slice(4)), _part(batch, slice(4, 8))]
    assert torch.allclose(
        module.training_step(batch, 0),
        (module.training_step(halves[0], 0) + module.training_step(halves[1], 0)) / 2,
    )


def test_padding_rows_do_not_count_in_validation() -> None:
    sums = EpochSums()
    sums.add(counted=torch.tensor([True, True, False]), loss=torch.tensor([1.0, 3.0, float("nan")]))
    sums.add(counted=torch.tensor([True]), loss=torch.tensor([5.0]))
    assert sums.means() == {"loss": 3.0}


def test_the_l1_penalty_is_added_to_the_loss_but_not_to_its_metric() -> None:
    batch, factor = _batches()[0, 0], 0.01
    plain, penalised = _module(), _module(l1=factor)
    difference = penalised.training_step(batch, 0) - plain.training_step(batch, 0)
    weights = [parameter for parameter in plain.network.parameters() if parameter.ndim > 1]
    assert float(difference.detach()) == pytest.approx(
        factor * sum(float(weight.detach().abs().sum()) for weight in weights), rel=1e-5
    )
    assert torch.equal(
        plain.nonfinite_guard._batches[0].losses, penalised.nonfinite_guard._batches[0].losses
    )
