from typing import Any

import numpy as np
import pytest
import torch

from slipway.errors import ParamsError
from slipway.training.batches import Batch, TrainingBatches, ValidationBatches, cut_step, training_loader, validation_loader
from tests.training.conftest import split_of

SPLIT = split_of(103)


def _training(world_size: int = 1, rank: int = 0, limit: int = 24, splits: Any = (SPLIT,), batch_size: int = 24) -> TrainingBatches:
    return TrainingBatches(splits, cut_step(batch_size, world_size, limit), rank, seed=3, matrices=None, classes=True)


def _step_rows(world_size: int, limit: int, epoch: int, step: int) -> set[int]:
    shape = cut_step(24, world_size, limit)
    rows: list[int] = []
    for rank in range(world_size):
        batches = _training(world_size, rank, limit)
        for index in range(step * shape.num_accumulated, (step + 1) * shape.num_accumulated):
            rows += batches[epoch, index].rows.tolist()
    assert len(rows) == len(set(rows)) == 24
    return set(rows)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("limit", [3, 6, 24])
def test_a_step_has_the_same_rows_however_it_is_cut(world_size: int, limit: int) -> None:
    for step in range(4):
        assert _step_rows(world_size, limit, epoch=5, step=step) == _step_rows(1, 24, epoch=5, step=step)


def test_another_epoch_has_another_order() -> None:
    assert _step_rows(1, 24, 0, 0) != _step_rows(1, 24, 1, 0)


def test_pixels_and_targets_belong_to_the_rows() -> None:
    batch = _training()[2, 1]
    assert np.array_equal(batch.inputs.numpy(), SPLIT.inputs[batch.rows.numpy()])
    assert np.array_equal(batch.targets.numpy(), SPLIT.targets[batch.rows.numpy()])


def test_offline_copies_are_rows_like_others() -> None:
    copies = split_of(20, start=500)
    batches = _training(splits=(SPLIT, copies), batch_size=123, limit=123)
    batch = batches[0, 0]
    both = np.concatenate([SPLIT.inputs, copies.inputs])
    assert sorted(batch.rows.tolist()) == list(range(123))
    assert np.array_equal(batch.inputs.numpy(), both[batch.rows.numpy()])


def _collect(num_workers: int) -> list[Batch]:
    loader = training_loader(_training(), num_workers)
    batches = []
    for epoch in (4, 5):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        batches += list(loader)
    return batches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_epoch_is_the_one_it_should_be_from_its_first_batch(num_workers: int) -> None:
    loader = training_loader(_training(), num_workers, first_epoch=7)
    batches = iter(loader)
    loader.sampler.set_epoch(7)  # type: ignore[attr-defined]
    assert torch.equal(next(batches).rows, _training()[7, 0].rows)


def test_workers_change_nothing() -> None:
    for alone, shared in zip(_collect(0), _collect(2), strict=True):
        assert torch.equal(alone.rows, shared.rows)
        assert torch.equal(alone.inputs, shared.inputs)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_validation_counts_every_row_once_and_deals_equally(world_size: int, batch_size: int) -> None:
    counted: list[int] = []
    lengths = set()
    for rank in range(world_size):
        loader = validation_loader(ValidationBatches(SPLIT, batch_size, world_size, rank, classes=True), 0)
        lengths.add(len(loader))
        for batch in loader:
            counted += batch.rows[batch.counted].tolist()
    assert sorted(counted) == list(range(103))
    assert len(lengths) == 1


def test_the_fewest_accumulation_steps_are_taken() -> None:
    shape = cut_step(96, 2, 20)
    assert (shape.per_device, shape.num_accumulated) == (16, 3)


def test_a_batch_that_processes_cannot_share_is_refused() -> None:
    with pytest.raises(ParamsError, match=r"batch_size is 25, which 2 processes.*example 26"):
        cut_step(25, 2, 100)


def test_fewer_rows_than_a_batch_are_refused_with_both_numbers() -> None:
    with pytest.raises(ParamsError, match="batch_size is 104, but there are only 103"):
        _training(batch_size=104, limit=104)
