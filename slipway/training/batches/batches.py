"""Reads batches straight from the memory map of the packed store.

The rows of each step, and the pairs to mix, are pure functions of the seed, the epoch, the row ids,
the text lengths and the block sizes of the shuffle. Dividing a step over processes or accumulation
steps does not change them. So the loader has no state: a resumed run gets the same batches, with
any number of workers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from slipway.data.augmentation.draws import draw, draw_mixing, draw_places
from slipway.data.augmentation.plan import AugmentPlan, text_operations
from slipway.data.engine.randomness import permutation, uniform
from slipway.data.store.packed import Inputs, PackedSplit
from slipway.system.errors import ParamsError
from slipway.training.augmentation.batch import Changes, device_changes
from slipway.training.augmentation.host import (
    StoredRows,
    changed_images,
    mixed_images,
    without_tokens,
    without_words,
)
from slipway.training.batches.shuffled_blocks import BlockShuffle, ReadAhead
from slipway.training.distributed.stop_signals import ignore_signals_in_worker

_BUCKET_STEPS = 32  # consecutive steps whose rows are sorted by length together
_LENGTH_ROWS = 1 << 14  # rows whose lengths are counted at a time


class Mixing(NamedTuple):
    """Mixing of a batch: the second target of each row, and the weight of the first target."""

    targets: Tensor  # (B,) targets of the partners, as `Batch.targets`
    own_fractions: Tensor  # (B,) float32 in [0, 1], weight of the row's own target
    soft: Tensor | None = None  # (B, K) float32 soft targets of the partner, if there are any


class Batch(NamedTuple):
    """The rows that one process computes in one forward pass."""

    # (B, H, W, C) uint8 pixels, (B, width) float32 columns, or (B, length) bytes or tokens. With
    # `changes` (R, S, S, C) stored pixels. (B, D) float32 features of a frozen body.
    inputs: Tensor
    targets: Tensor  # (B,) int64 class index, or float32 number
    weights: Tensor  # (B,) float32 weight in the loss
    counted: Tensor  # (B,) bool, False for padding of the last validation batch
    rows: Tensor  # (B,) int64 position in the split
    changes: Changes | None  # for `augment_batch` on a GPU; None if the inputs are final
    mixing: Mixing | None  # None if no targets are mixed
    soft: Tensor | None = None  # (B, K) float32 outputs of a teacher, if there is one


@dataclass(frozen=True)
class ImageChanges:
    """Settings for augmenting training images: the plan, the image size, and the device."""

    plan: AugmentPlan
    size_px: int  # size that the network takes; images may be stored larger
    on_device: bool  # the device gets stored pixels and augments them


@dataclass(frozen=True)
class TextChanges:
    """Settings for augmenting training texts: random words or tokens are dropped."""

    plan: AugmentPlan
    separator: int | None  # the token between the texts of a pair

    def apply(self, rows: NDArray[Any], epoch: int, keys: NDArray[np.uint64]) -> NDArray[Any]:
        """Drop words or tokens of `rows` (B, L) at random; return (B, L) with the same dtype."""
        for name in text_operations(self.plan):
            drawn = draw_places(self.plan, epoch, keys, rows.shape[1], name)
            if name == "token_dropout":
                rows = without_tokens(rows, drawn, self.plan.token_dropout, self.separator)
            else:
                rows = without_words(rows, drawn, self.plan.word_deletion)
        return rows


@dataclass(frozen=True)
class StepShape:
    """The division of an optimizer step over processes and accumulated batches.

    batch_size == per_device * world_size * num_accumulated.
    """

    batch_size: int
    per_device: int
    world_size: int  # processes, or copies of the network, with different rows
    num_accumulated: int
    num_micro_batches: int = 1  # micro-batches of a pipeline in each batch of a process

    def rows(self, step: int, accumulated: int, rank: int) -> slice:
        """Return the part of the epoch's order that `rank` reads in one accumulation step."""
        start = step * self.batch_size + (accumulated * self.world_size + rank) * self.per_device
        return slice(start, start + self.per_device)


def cut_step(
    batch_size: int, world_size: int, max_batch_per_device: int, who: str = "processes"
) -> StepShape:
    """Divide an optimizer step into the fewest batches that respect `max_batch_per_device`.

    Raises ParamsError if the batch cannot be divided equally; `who` names the readers in its
    message.
    """
    if batch_size % world_size:
        raise ParamsError(
            f"train.batch_size is {batch_size}, which {world_size} {who} cannot share equally. "
            f"Use a multiple of {world_size}, for example "
            f"{-(-batch_size // world_size) * world_size}."
        )
    per_process = batch_size // world_size
    num_accumulated = next(
        number
        for number in range(1, per_process + 1)
        if per_process % number == 0 and per_process // number <= max_batch_per_device
    )
    return StepShape(batch_size, per_process // num_accumulated, world_size, num_accumulated)


class TrainingBatches(Dataset[Batch]):
    """Training batches of one rank, indexed by (epoch, number of the batch in the epoch).

    Rows that do not fill the last step of an epoch are skipped; they differ from epoch to epoch.

    Args:
        splits: the training split, and its offline copies if there are any.
        changes: augmentation of images; None for tables and texts.
        target_dtype: as in the record of the target's kind.
        soft: (N, K) float32 outputs of a distillation teacher for the rows of all splits.
        buckets: the rows of a step have nearly the same number of tokens, so that little of it is
            padding. The inputs are (N, L), 0 for none.
        texts: changes of texts; None if there are none.
        blocks: shuffle blocks of rows, and read them ahead; None shuffles single rows.
    """

    def __init__(
        self,
        splits: Sequence[PackedSplit],
        shape: StepShape,
        rank: int,
        seed: int,
        changes: ImageChanges | None,
        target_dtype: str,
        soft: Tensor | None = None,
        *,
        buckets: bool = False,
        texts: TextChanges | None = None,
        blocks: BlockShuffle | None = None,
    ) -> None:
        self._inputs = StoredRows([split.read for split in splits])
        self._keys = np.concatenate([split.keys for split in splits])
        self._targets = torch.cat([_target_tensor(split, target_dtype) for split in splits])
        self._weights = torch.cat([_weight_tensor(split) for split in splits])
        self._shape, self._rank, self._seed = shape, rank, seed
        self._changes, self._soft, self._texts = changes, soft, texts
        has_features = splits[0].features is not None
        is_final = changes and changes.plan.is_identity and self._inputs.shape[0] == changes.size_px
        if is_final or has_features:
            self._changes = None
        self._orders: dict[int, NDArray[np.int64]] = {}  # orders of two epochs at most
        self._lengths: NDArray[np.int64] | None = None
        if buckets:
            self._lengths = np.concatenate([_lengths(split.inputs) for split in splits])
        self.ids = [sample_id for split in splits for sample_id in split.ids]
        self.num_steps = len(self._keys) // shape.batch_size
        if self.num_steps == 0:
            raise ParamsError(
                f"train.batch_size is {shape.batch_size}, but there are only {len(self._keys)} "
                f"training rows. Use at most {len(self._keys)}, or more data."
            )
        self._blocks, self._part_rows = blocks, [len(split) for split in splits]
        # Steps whose rows are in memory together.
        self._steps_together = self.num_steps
        self._read_ahead: ReadAhead | None = None
        if blocks:
            self._steps_together = max(1, blocks.window // shape.batch_size)
            self._read_ahead = ReadAhead([split.read for split in splits], blocks.block)

    def __len__(self) -> int:
        return self.num_steps * self._shape.num_accumulated

    def __getitem__(self, place: tuple[int, int]) -> Batch:
        epoch, (step, accumulated) = place[0], divmod(place[1], self._shape.num_accumulated)
        positions = self._shape.rows(step, accumulated, self._rank)
        rows = self._epoch_order(epoch)[positions]
        if self._read_ahead is not None:
            self._await_rows(self._read_ahead, epoch, step)
        batch = Batch(
            inputs=torch.empty(0),
            targets=self._targets[rows],
            weights=self._weights[rows],
            counted=torch.ones(len(rows), dtype=torch.bool),
            rows=torch.from_numpy(rows.copy()),
            changes=None,
            mixing=None,
            soft=self._soft[rows] if self._soft is not None else None,
        )
        if self._changes is None:
            inputs = self._inputs.gather(rows)
            if self._texts is not None:
                inputs = self._texts.apply(inputs, epoch, self._keys[rows])
            return batch._replace(inputs=torch.from_numpy(inputs))
        partner_rows = self._partners(self._changes.plan, epoch, step, positions)
        return self._augmented(batch, self._changes, epoch, rows, partner_rows)

    def _augmented(
        self,
        batch: Batch,
        how: ImageChanges,
        epoch: int,
        rows: NDArray[np.int64],
        partner_rows: NDArray[np.int64],
    ) -> Batch:
        """Augment the images, or attach the changes with which the device augments them.

        `partner_rows` is (B,), or empty without mixing.
        """
        needed, partners, mix = rows, np.arange(len(rows)), None
        if len(partner_rows):
            mix = draw_mixing(how.plan, epoch, self._keys[rows], how.size_px)
            mixed_with = np.where(mix.own_fraction < 1, partner_rows, rows)
            needed, partners = _with_partners(rows, mixed_with)
            mixing = Mixing(
                self._targets[partner_rows],
                torch.from_numpy(mix.own_fraction),
                self._soft[partner_rows] if self._soft is not None else None,
            )
            batch = batch._replace(mixing=mixing)
        change = draw(how.plan, epoch, self._keys[needed])
        if how.on_device:
            stored_px, _, channels = self._inputs.shape
            return batch._replace(
                inputs=torch.from_numpy(self._inputs.gather(needed)),
                changes=device_changes(change, mix, partners, stored_px, how.size_px, channels),
            )
        images = changed_images(self._inputs, needed, change, how.size_px)
        if mix:
            images = mixed_images(images, partners, mix)
        return batch._replace(inputs=torch.from_numpy(images))

    def _partners(
        self, plan: AugmentPlan, epoch: int, step: int, positions: slice
    ) -> NDArray[np.int64]:
        """Return the row that each row at `positions` is mixed with, (B,) int64.

        Within a step, all rows have the same distance to their partners. Returns an empty array if
        the plan does not mix.
        """
        size = self._shape.batch_size
        if not plan.mixes or size == 1:
            return np.empty(0, np.int64)
        draw = uniform(self._seed, epoch, np.array([step], np.uint64), "partner")[0]
        distance = 1 + int((size - 1) * draw)
        start = step * size
        within_step = np.arange(positions.start, positions.stop) - start
        rows: NDArray[np.int64] = self._epoch_order(epoch)[start + (within_step + distance) % size]
        return rows

    def _await_rows(self, read_ahead: ReadAhead, epoch: int, step: int) -> None:
        """Wait until the rows of a step are in memory, and start reading those of later steps."""
        group, last = (number // self._steps_together for number in (step, self.num_steps - 1))
        if read_ahead.place != (epoch, group):
            following = (epoch, group + 1) if group < last else (epoch + 1, 0)
            now, later = self._rows_together(epoch, group), self._rows_together(*following)
            read_ahead.move((epoch, group), now, later)
        read_ahead.wait()

    def _rows_together(self, epoch: int, group: int) -> NDArray[np.int64]:
        """Return the rows that this rank reads in a group of consecutive steps."""
        shape, begin = self._shape, group * self._steps_together
        steps = range(begin, min(begin + self._steps_together, self.num_steps))
        order = self._epoch_order(epoch)[begin * shape.batch_size : steps.stop * shape.batch_size]
        if self._changes and self._changes.plan.mixes:  # rows are mixed with those of other ranks
            return order
        cut = len(steps), shape.num_accumulated, shape.world_size, shape.per_device
        return order.reshape(cut)[:, :, self._rank].reshape(-1)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            for other in [other for other in self._orders if abs(other - epoch) > 1]:
                del self._orders[other]
            self._orders[epoch] = self._drawn_order(epoch)
        return self._orders[epoch]

    def _drawn_order(self, epoch: int) -> NDArray[np.int64]:
        if self._blocks is None:
            order = permutation(self._seed, epoch, self._keys)
        else:
            order = self._blocks.order(self._seed, epoch, self._keys, self._part_rows)
        if self._lengths is not None:
            order = self._bucketed(order, self._lengths, epoch)
        if self._blocks is not None:
            # Each process then reads few blocks, the same part of every step.
            used = self.num_steps * self._shape.batch_size
            order[:used].reshape(self.num_steps, -1).sort(axis=1)
        return order

    def _bucketed(
        self, order: NDArray[np.int64], lengths: NDArray[np.int64], epoch: int
    ) -> NDArray[np.int64]:
        """Sort rows by length within groups of a few steps, then put the steps in random order.

        If blocks are shuffled, a step stays close to the blocks of its rows.
        """
        size = self._shape.batch_size
        used, window = self.num_steps * size, min(_BUCKET_STEPS, self._steps_together) * size
        parts = [order[begin : min(begin + window, used)] for begin in range(0, used, window)]
        by_length = [part[np.argsort(lengths[part], kind="stable")] for part in parts]
        steps = np.concatenate(by_length).reshape(self.num_steps, size)
        numbers = np.arange(self.num_steps, dtype=np.uint64)
        draws = uniform(self._seed, epoch, numbers, "buckets")
        groups = numbers // self._steps_together
        return steps[np.lexsort((draws, groups))].reshape(-1)


class ValidationBatches(Dataset[Batch]):
    """Batches of a split in its own order, divided over the ranks; each row is counted once.

    Every rank has the same number of batches, as collective operations require. Padding rows are
    not counted.
    """

    def __init__(
        self, split: PackedSplit, batch_size: int, world_size: int, rank: int, target_dtype: str
    ) -> None:
        self._split, self._world_size, self._rank = split, world_size, rank
        self._targets, self._weights = _target_tensor(split, target_dtype), _weight_tensor(split)
        per_rank = -(-len(split) // world_size)
        self._batch_size = min(batch_size, per_rank)
        self._num_batches = -(-per_rank // self._batch_size)

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> Batch:
        start = (index * self._world_size + self._rank) * self._batch_size
        wanted = np.arange(start, start + self._batch_size)
        rows = np.minimum(wanted, len(self._split) - 1)
        return Batch(
            inputs=torch.from_numpy(self._split.read[rows]),
            targets=self._targets[rows],
            weights=self._weights[rows],
            counted=torch.from_numpy(wanted < len(self._split)),
            rows=torch.from_numpy(rows),
            changes=None,
            mixing=None,
        )


class EpochSampler(Sampler[tuple[int, int]]):
    """Yields (epoch, index) for each batch; the trainer calls `set_epoch` before each epoch.

    That call is too late for the first epoch, whose batches loader processes have prefetched by
    then. So the constructor takes the first epoch, and the batch at which a resumed one starts.
    """

    def __init__(self, num_batches: int, first_epoch: int, first_batch: int) -> None:
        self._num_batches, self._first = num_batches, (first_epoch, first_batch)
        self.epoch = first_epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch, (first_epoch, first_batch) = self.epoch, self._first
        start = first_batch if epoch == first_epoch else 0
        return ((epoch, index) for index in range(start, self._num_batches))

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return self._num_batches


def training_loader(
    batches: TrainingBatches,
    num_workers: int,
    *,
    first_epoch: int = 0,
    first_batch: int = 0,
    pin_memory: bool = False,
) -> DataLoader[Batch]:
    """Return a loader of whole batches in epoch order, from `first_batch` of `first_epoch` on."""
    sampler = EpochSampler(len(batches), first_epoch, first_batch)
    return batch_loader(batches, num_workers, sampler, pin_memory=pin_memory)


def batch_loader(
    batches: Dataset[Batch],
    num_workers: int,
    sampler: EpochSampler | None = None,
    *,
    pin_memory: bool = False,
) -> DataLoader[Batch]:
    """Return a loader of whole batches, in the order of `sampler` or else of the dataset."""
    return DataLoader(
        batches,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        worker_init_fn=ignore_signals_in_worker,
    )


def _with_partners(
    rows: NDArray[np.int64], partner_rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Append the partner rows that `rows` lacks, and locate the partner of each row.

    Returns the extended rows (R,), and the positions (B,) of the partners in them. A partner that
    belongs to another process or accumulation step is augmented here again, with identical pixels.
    """
    needed = np.concatenate([rows, np.setdiff1d(partner_rows, rows)])
    order = np.argsort(needed)
    return needed, order[np.searchsorted(needed, partner_rows, sorter=order)]


def _lengths(inputs: Inputs) -> NDArray[np.int64]:
    """Return the number of nonzero elements in each row of (N, L): (N,)."""
    parts = [
        np.count_nonzero(inputs[begin : begin + _LENGTH_ROWS], axis=1)
        for begin in range(0, len(inputs), _LENGTH_ROWS)
    ]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _target_tensor(split: PackedSplit, dtype: str) -> Tensor:
    return torch.from_numpy(split.targets.astype(dtype))


def _weight_tensor(split: PackedSplit) -> Tensor:
    return torch.from_numpy(split.weights.astype(np.float32))
