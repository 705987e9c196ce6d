from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from slipway.data.augmentation.plan import plan_from_params
from slipway.data.store.packed import PackedSplit
from slipway.system.errors import ParamsError
from slipway.training.augmentation.batch import augment_batch
from slipway.training.batches.batches import (
    Batch,
    ImageChanges,
    TrainingBatches,
    ValidationBatches,
    batch_loader,
    cut_step,
    training_loader,
)
from tests.data.augmentation.test_plan import ON
from tests.project_params import augment_params
from tests.training.conftest import split_of

SPLIT = split_of(103)
EVERYTHING = plan_from_params(augment_params(**ON, mix_probability=0.7), seed=3)


def _training(
    world_size: int = 1,
    rank: int = 0,
    limit: int = 24,
    splits: Any = (SPLIT,),
    batch_size: int = 24,
    changes: ImageChanges | None = None,
) -> TrainingBatches:
    return TrainingBatches(
        splits,
        cut_step(batch_size, world_size, limit),
        rank,
        seed=3,
        changes=changes,
        target_dtype="int64",
    )


def _changes(plan: Any = EVERYTHING, size_px: int = 8, on_device: bool = False) -> ImageChanges:
    return ImageChanges(plan, size_px, on_device)


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
def test_a_step_has_the_same_rows_for_any_process_layout(world_size: int, limit: int) -> None:
    for step in range(4):
        assert _step_rows(world_size, limit, epoch=5, step=step) == _step_rows(
            1, 24, epoch=5, step=step
        )


def test_each_epoch_has_a_different_order_of_rows() -> None:
    assert _step_rows(1, 24, 0, 0) != _step_rows(1, 24, 1, 0)


def test_pixels_and_targets_of_a_batch_are_those_of_its_rows() -> None:
    batch = _training()[2, 1]
    assert np.array_equal(batch.inputs.numpy(), SPLIT.inputs[batch.rows.numpy()])
    assert np.array_equal(batch.targets.numpy(), SPLIT.targets[batch.rows.numpy()])


def test_batches_contain_offline_copies_like_original_rows() -> None:
    copies = split_of(20, start=500)
    batches = _training(splits=(SPLIT, copies), batch_size=123, limit=123)
    batch = batches[0, 0]
    both = np.concatenate([SPLIT.inputs, copies.inputs])
    assert sorted(batch.rows.tolist()) == list(range(123))
    assert np.array_equal(batch.inputs.numpy(), both[batch.rows.numpy()])


def _step(
    world_size: int, limit: int, *, on_device: bool = False, size_px: int = 8
) -> dict[int, tuple[Any, ...]]:
    """Map each row of a step to its pixels, its partner's target and its own fraction."""
    shape, found = cut_step(24, world_size, limit), dict[int, tuple[Any, ...]]()
    for rank in range(world_size):
        batches = _training(
            world_size, rank, limit, changes=_changes(size_px=size_px, on_device=on_device)
        )
        for index in range(2 * shape.num_accumulated, 3 * shape.num_accumulated):
            batch = batches[5, index]
            inputs = (
                batch.inputs
                if batch.changes is None
                else augment_batch(batch.inputs, batch.changes)
            )
            assert inputs.shape == (len(batch.rows), size_px, size_px, 1)
            assert inputs.dtype == torch.uint8
            assert batch.mixing is not None
            parts = (
                batch.rows.tolist(),
                inputs.numpy(),
                batch.mixing.targets.tolist(),
                batch.mixing.own_fractions.tolist(),
            )
            found |= {
                row: (image.tobytes(), target, share)
                for row, image, target, share in zip(*parts, strict=True)
            }
    return found


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("world_size", "limit"), [(2, 24), (1, 6), (4, 3)])
def test_mixed_images_are_the_same_for_any_process_layout(
    world_size: int, limit: int, on_device: bool
) -> None:
    whole = _step(1, 24, on_device=on_device)
    assert _step(world_size, limit, on_device=on_device) == whole
    shares = [share for _, _, share in whole.values()]
    assert 0 < sum(share < 1 for share in shares) < 24


def test_a_row_is_mixed_with_another_row_of_its_step() -> None:
    blend = plan_from_params(augment_params(mixup_alpha=1.0), seed=3)
    batch, plain = _training(changes=_changes(blend))[1, 2], _training()[1, 2]
    assert batch.mixing is not None
    further = [
        shift
        for shift in range(1, 24)
        if torch.equal(batch.mixing.targets, plain.targets.roll(-shift))
        and np.abs(
            batch.inputs.numpy()
            - _blended(plain.inputs.numpy(), batch.mixing.own_fractions.numpy(), shift)
        ).max()
        <= 1
    ]
    assert len(further) == 1


def _blended(images: Any, shares: Any, shift: int) -> Any:
    own = shares[:, None, None, None]
    return own * images + (1 - own) * np.roll(images, -shift, axis=0)


def test_larger_stored_images_are_shrunk_to_the_networks_size_with_or_without_augmentation() -> (
    None
):
    nothing = plan_from_params(augment_params(), seed=3)
    for plan, on_device in (
        (nothing, False),
        (nothing, True),
        (EVERYTHING, False),
        (EVERYTHING, True),
    ):
        batch = _training(changes=_changes(plan, size_px=6, on_device=on_device))[0, 0]
        inputs = (
            batch.inputs if batch.changes is None else augment_batch(batch.inputs, batch.changes)
        )
        assert inputs.shape == (24, 6, 6, 1)


def test_batches_without_augmentation_hold_the_stored_pixels() -> None:
    batch = _training(changes=_changes(plan_from_params(augment_params(), seed=3), on_device=True))[
        0, 0
    ]
    assert batch.changes is None
    assert batch.mixing is None
    assert torch.equal(batch.inputs, _training()[0, 0].inputs)


def test_a_batch_of_one_row_is_not_mixed() -> None:
    assert _training(batch_size=1, limit=1, changes=_changes())[0, 0].mixing is None


def test_validation_images_are_never_changed() -> None:
    batch = ValidationBatches(SPLIT, 1000, 1, 0, target_dtype="int64")[0]
    assert batch.changes is None
    assert batch.mixing is None
    assert np.array_equal(batch.inputs.numpy(), SPLIT.inputs[:])


def _collect(num_workers: int, changes: ImageChanges | None = None) -> list[Batch]:
    loader = training_loader(_training(changes=changes), num_workers)
    batches = []
    for epoch in (4, 5):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        batches += list(loader)
    return batches


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_starts_at_the_requested_epoch(num_workers: int) -> None:
    loader = training_loader(_training(), num_workers, first_epoch=7)
    batches = iter(loader)
    loader.sampler.set_epoch(7)  # type: ignore[attr-defined]
    assert torch.equal(next(batches).rows, _training()[7, 0].rows)


def test_loader_processes_produce_the_same_batches_as_the_trainer() -> None:
    for alone, shared in zip(_collect(0, _changes()), _collect(2, _changes()), strict=True):
        assert torch.equal(alone.rows, shared.rows)
        assert torch.equal(alone.inputs, shared.inputs)
        assert alone.mixing is not None
        assert shared.mixing is not None
        assert torch.equal(alone.mixing.targets, shared.mixing.targets)
        assert torch.equal(alone.mixing.own_fractions, shared.mixing.own_fractions)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_validation_counts_every_row_once_in_equally_many_batches_per_rank(
    world_size: int, batch_size: int
) -> None:
    counted: list[int] = []
    lengths = set()
    for rank in range(world_size):
        loader = batch_loader(
            ValidationBatches(SPLIT, batch_size, world_size, rank, target_dtype="int64"), 0
        )
        lengths.add(len(loader))
        for batch in loader:
            counted += batch.rows[batch.counted].tolist()
    assert sorted(counted) == list(range(103))
    assert len(lengths) == 1


def test_an_optimizer_step_is_divided_into_the_fewest_accumulation_steps() -> None:
    shape = cut_step(96, 2, 20)
    assert (shape.per_device, shape.num_accumulated) == (16, 3)


def test_a_batch_size_that_the_processes_cannot_divide_is_refused() -> None:
    with pytest.raises(ParamsError, match=r"batch_size is 25, which 2 processes.*example 26"):
        cut_step(25, 2, 100)


def test_fewer_rows_than_a_batch_are_refused_with_both_numbers() -> None:
    with pytest.raises(ParamsError, match="batch_size is 104, but there are only 103"):
        _training(batch_size=104, limit=104)


def test_batches_hold_the_soft_targets_of_their_rows_and_mixing_partners() -> None:
    soft = torch.arange(len(SPLIT), dtype=torch.float32)[:, None] * torch.tensor([1.0, -1.0])
    plain = TrainingBatches(
        [SPLIT], cut_step(24, 1, 24), 0, 3, _changes(), target_dtype="int64", soft=soft
    )
    batch = plain[2, 1]
    assert batch.soft is not None
    assert torch.equal(batch.soft[:, 0].long(), batch.rows)
    assert batch.mixing is not None
    assert batch.mixing.soft is not None
    targets = torch.from_numpy(SPLIT.targets.astype("int64"))
    assert torch.equal(targets[batch.mixing.soft[:, 0].long()], batch.mixing.targets)
    assert _training()[2, 1].soft is None


def _token_split(num_rows: int, start: int = 0) -> PackedSplit:
    """Return a split of rows of 1 to 40 tokens, in random order."""
    lengths = np.random.default_rng(start).integers(1, 41, num_rows)
    inputs = (np.arange(40) < lengths[:, None]).astype(np.int32)
    inputs[::7, 0] = -1  # texts that were cut
    return replace(split_of(num_rows, start=start), inputs=inputs)


def _bucketed(world_size: int = 1, rank: int = 0, limit: int = 8) -> TrainingBatches:
    splits = [_token_split(403), _token_split(60, start=700)]
    shape = cut_step(8, world_size, limit)
    return TrainingBatches(splits, shape, rank, 3, None, "int64", buckets=True)


def _rows_by_step(world_size: int, limit: int, epoch: int) -> list[list[int]]:
    all_ranks = [_bucketed(world_size, rank, limit) for rank in range(world_size)]
    num_accumulated = cut_step(8, world_size, limit).num_accumulated
    return [
        [
            row
            for index in range(step * num_accumulated, (step + 1) * num_accumulated)
            for batches in all_ranks
            for row in batches[epoch, index].rows.tolist()
        ]
        for step in range(all_ranks[0].num_steps)
    ]


@pytest.mark.parametrize(("world_size", "limit"), [(1, 2), (2, 4), (4, 1)])
def test_bucketed_steps_have_the_same_rows_for_any_process_layout(
    world_size: int, limit: int
) -> None:
    for epoch in (0, 3):
        assert _rows_by_step(world_size, limit, epoch) == _rows_by_step(1, 8, epoch)


def test_bucketed_epochs_differ_and_contain_each_row_at_most_once() -> None:
    first, second = (_rows_by_step(1, 8, epoch) for epoch in (0, 1))
    assert first != second
    rows = [row for step in first for row in step]
    assert len(set(rows)) == len(rows) == 57 * 8


def test_bucketing_leaves_little_padding_and_alternates_long_and_short_steps() -> None:
    batches = _bucketed()
    lengths = [
        np.count_nonzero(batches[2, index].inputs.numpy(), axis=1)
        for index in range(batches.num_steps)
    ]
    padded = 1 - np.sum(lengths) / sum(8 * own.max() for own in lengths)
    assert padded < 0.12
    assert min(own.min() for own in lengths) == 1
    longest = [own.max() for own in lengths]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.5
