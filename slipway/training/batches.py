"""Batches, straight from the memory map of the packed store.

Which rows make up which step is a pure function of (seed, epoch, ids), and how a step is cut over
processes and accumulation steps does not change its set of rows. So there is no loader state: a
resumed run, and any number of workers, see the same batches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from slipway.data.packed import PackedSplit
from slipway.data.randomness import permutation
from slipway.errors import ParamsError


class Batch(NamedTuple):
    """What one process sees at a time."""

    inputs: Tensor  # (B, H, W, C) uint8 pixels, or (B, width) float32 columns
    targets: Tensor  # (B,) int64 class index, or float32 number
    weights: Tensor  # (B,) float32 in the loss
    counted: Tensor  # (B,) bool, False for a row that only fills up the last batch of validation
    rows: Tensor  # (B,) int64 position in the split
    matrices: Tensor | None  # (B, 2, 3) float32 for `augment_batch`; None where nothing is augmented


Matrices = Callable[[int, NDArray[np.uint64]], NDArray[np.float32]]  # (epoch, keys (N,)) -> (N, 2, 3) sampling matrices


@dataclass(frozen=True)
class StepShape:
    """How the rows of one optimizer step are cut: batch_size == per_device * world_size * num_accumulated."""

    batch_size: int
    per_device: int
    world_size: int
    num_accumulated: int

    def rows(self, step: int, accumulated: int, rank: int) -> slice:
        """The part of an epoch's order that `rank` takes in accumulation step `accumulated` of `step`."""
        start = step * self.batch_size + (accumulated * self.world_size + rank) * self.per_device
        return slice(start, start + self.per_device)


def cut_step(batch_size: int, world_size: int, max_batch_per_device: int) -> StepShape:
    """The fewest accumulation steps that keep a device at or below `max_batch_per_device`; ParamsError if nothing divides."""
    if batch_size % world_size:
        raise ParamsError(
            f"train.batch_size is {batch_size}, which {world_size} processes cannot share equally. "
            f"Use a multiple of {world_size}, for example {-(-batch_size // world_size) * world_size}."
        )
    share = batch_size // world_size
    num_accumulated = next(number for number in range(1, share + 1) if share % number == 0 and share // number <= max_batch_per_device)
    return StepShape(batch_size, share // num_accumulated, world_size, num_accumulated)


class TrainingBatches(Dataset[Batch]):
    """The training rows cut into batches of one rank; an item is named by (epoch, index of the batch in the epoch).

    `splits` are the training split and, where there are some, its offline copies; `matrices` is None where nothing is
    augmented. Rows that do not fill the last step are left out of that epoch; which rows these are changes with the epoch.
    """

    def __init__(
        self, splits: Sequence[PackedSplit], shape: StepShape, rank: int, seed: int, matrices: Matrices | None, *, classes: bool
    ) -> None:
        self._inputs = [split.inputs for split in splits]
        self._keys = np.concatenate([split.keys for split in splits])
        self._targets = torch.cat([_target_tensor(split, classes) for split in splits])
        self._weights = torch.cat([_weight_tensor(split) for split in splits])
        self._shape, self._rank, self._seed, self._matrices = shape, rank, seed, matrices
        self._order: tuple[int, NDArray[np.int64]] | None = None
        self.ids = [sample_id for split in splits for sample_id in split.ids]
        self.num_steps = len(self._keys) // shape.batch_size
        if self.num_steps == 0:
            raise ParamsError(
                f"train.batch_size is {shape.batch_size}, but there are only {len(self._keys)} training rows. "
                f"Use at most {len(self._keys)}, or more data."
            )

    def __len__(self) -> int:
        return self.num_steps * self._shape.num_accumulated

    def __getitem__(self, place: tuple[int, int]) -> Batch:
        epoch, index = place
        rows = self._epoch_order(epoch)[self._shape.rows(*divmod(index, self._shape.num_accumulated), self._rank)]
        return Batch(
            inputs=torch.from_numpy(self._gather(rows)),
            targets=self._targets[rows],
            weights=self._weights[rows],
            counted=torch.ones(len(rows), dtype=torch.bool),
            rows=torch.from_numpy(rows.copy()),
            matrices=torch.from_numpy(self._matrices(epoch, self._keys[rows])) if self._matrices else None,
        )

    def _gather(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        if len(self._inputs) == 1:
            rows_of_one: NDArray[Any] = self._inputs[0][rows]
            return rows_of_one
        gathered = np.empty((len(rows), *self._inputs[0].shape[1:]), dtype=self._inputs[0].dtype)
        start = 0
        for inputs in self._inputs:
            here = (rows >= start) & (rows < start + len(inputs))
            gathered[here] = inputs[rows[here] - start]
            start += len(inputs)
        return gathered

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(self._seed, epoch, self._keys))
        return self._order[1]


class ValidationBatches(Dataset[Batch]):
    """A split in its own order, dealt out to the ranks; every row is counted on exactly one of them.

    Every rank has the same number of batches, as collective operations require: what is missing is
    filled with rows that are not counted.
    """

    def __init__(self, split: PackedSplit, batch_size: int, world_size: int, rank: int, *, classes: bool) -> None:
        self._split, self._world_size, self._rank = split, world_size, rank
        self._targets, self._weights = _target_tensor(split, classes), _weight_tensor(split)
        share = -(-len(split) // world_size)
        self._batch_size = min(batch_size, share)
        self._num_batches = -(-share // self._batch_size)

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> Batch:
        start = (index * self._world_size + self._rank) * self._batch_size
        wanted = np.arange(start, start + self._batch_size)
        rows = np.minimum(wanted, len(self._split) - 1)
        return Batch(
            inputs=torch.from_numpy(self._split.inputs[rows]),
            targets=self._targets[rows],
            weights=self._weights[rows],
            counted=torch.from_numpy(wanted < len(self._split)),
            rows=torch.from_numpy(rows),
            matrices=None,
        )


class EpochSampler(Sampler[tuple[int, int]]):
    """(epoch, index) for each batch; the trainer calls `set_epoch` before an epoch.

    For the first one it does so too late: by then loader processes have fetched ahead. So that one is given here.
    """

    def __init__(self, num_batches: int, first_epoch: int) -> None:
        self._num_batches, self.epoch = num_batches, first_epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self.epoch, index) for index in range(self._num_batches))

    def __len__(self) -> int:
        return self._num_batches


def training_loader(batches: TrainingBatches, num_workers: int, *, first_epoch: int = 0, pin_memory: bool = False) -> DataLoader[Batch]:
    """Serves whole batches in the order of the epoch; `first_epoch` counts from 0."""
    return _loader(batches, EpochSampler(len(batches), first_epoch), num_workers, pin_memory)


def validation_loader(batches: ValidationBatches, num_workers: int, *, pin_memory: bool = False) -> DataLoader[Batch]:
    """Serves whole batches in the order of the split."""
    return _loader(batches, None, num_workers, pin_memory)


def _loader(batches: Dataset[Batch], sampler: EpochSampler | None, num_workers: int, pin_memory: bool) -> DataLoader[Batch]:
    return DataLoader(
        batches, batch_size=None, sampler=sampler, num_workers=num_workers, pin_memory=pin_memory, persistent_workers=num_workers > 0
    )


def _target_tensor(split: PackedSplit, classes: bool) -> Tensor:
    return torch.from_numpy(split.targets.astype(np.int64 if classes else np.float32))


def _weight_tensor(split: PackedSplit) -> Tensor:
    return torch.from_numpy(split.weights.astype(np.float32))
