"""Tests of shuffling by blocks: each row occurs once, on any machine, and is read ahead."""

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.data.augmentation.plan import plan_from_params
from slipway.data.store.jpeg_inputs import JpegInputs, encode_jpeg
from slipway.data.store.packed import PackedSplit, file_span, stored_bytes
from slipway.system.errors import IntegrityError
from slipway.training.batches.batches import (
    ImageChanges,
    TrainingBatches,
    cut_step,
    training_loader,
)
from slipway.training.batches.shuffled_blocks import BlockShuffle, ReadAhead, block_shuffle
from tests.data.augmentation.test_plan import ON
from tests.packed_rows import packed_split
from tests.project_params import augment_params
from tests.training.conftest import split_of, write_project
from tests.training.forked_runs import kill_after_checkpoint, run_forked
from tests.training.real_runs import weights_digest

EVERY_STEP = {"checkpoint_every_minutes": 1e-9}
SPLITS = (split_of(403), split_of(97, start=900))
BLOCKS = BlockShuffle(block=20, window=120)


def _batches(
    world_size: int = 1,
    rank: int = 0,
    limit: int = 24,
    *,
    splits: Sequence[PackedSplit] = SPLITS,
    blocks: BlockShuffle | None = BLOCKS,
    **further: Any,
) -> TrainingBatches:
    shape = cut_step(24, world_size, limit)
    changes = further.pop("changes", None)
    return TrainingBatches(splits, shape, rank, 3, changes, "int64", blocks=blocks, **further)


def _steps(world_size: int = 1, limit: int = 24, epoch: int = 0, **further: Any) -> list[list[int]]:
    ranks = [_batches(world_size, rank, limit, **further) for rank in range(world_size)]
    num_accumulated = cut_step(24, world_size, limit).num_accumulated
    return [
        [
            row
            for index in range(step * num_accumulated, (step + 1) * num_accumulated)
            for batches in ranks
            for row in batches[epoch, index].rows.tolist()
        ]
        for step in range(ranks[0].num_steps)
    ]


def _order(blocks: BlockShuffle, epoch: int = 0, seed: int = 3) -> np.ndarray[Any, Any]:
    keys = np.concatenate([split.keys for split in SPLITS])
    return blocks.order(seed, epoch, keys, [len(split) for split in SPLITS])


@pytest.mark.parametrize("blocks", [BLOCKS, BlockShuffle(1, 1), BlockShuffle(7, 500)])
def test_an_epoch_shuffled_by_blocks_contains_every_row_once(blocks: BlockShuffle) -> None:
    for epoch in range(3):
        assert sorted(_order(blocks, epoch)) == list(range(500))


def test_each_epoch_and_seed_has_another_order_of_blocks_and_rows() -> None:
    first = _order(BLOCKS)
    assert (first == _order(BLOCKS)).all()
    for other in (_order(BLOCKS, epoch=1), _order(BLOCKS, seed=4)):
        assert set(first[:120]) != set(other[:120])


def test_rows_shuffled_together_fill_whole_blocks_and_are_in_random_order() -> None:
    order = _order(BLOCKS)
    for begin in range(0, 480, 120):
        rows = order[begin : begin + 120]
        blocks = {(row // 20, False) if row < 403 else ((row - 403) // 20, True) for row in rows}
        assert len(blocks) <= 120 // 20 + 3  # the last block of each file is shorter
        assert abs(np.corrcoef(rows, np.arange(120))[0, 1]) < 0.3


@pytest.mark.parametrize(("world_size", "limit"), [(2, 24), (2, 3), (3, 24), (3, 4)])
def test_block_shuffled_steps_have_the_same_rows_for_any_number_of_processes(
    world_size: int, limit: int
) -> None:
    for epoch in (0, 2):
        steps = _steps(world_size, limit, epoch)
        assert steps == _steps(epoch=epoch)
        rows = [row for step in steps for row in step]
        assert len(set(rows)) == len(rows) == 500 // 24 * 24


def test_a_block_buffer_for_all_rows_gives_the_same_steps_as_shuffling_single_rows() -> None:
    together = _steps(blocks=BlockShuffle(block=20, window=500))
    assert [set(step) for step in together] == [set(step) for step in _steps(blocks=None)]


def test_each_process_reads_its_own_part_of_the_blocks() -> None:
    blocks = BlockShuffle(block=10, window=480)
    for rank in range(4):
        batches = _batches(4, rank, blocks=blocks)
        rows = np.concatenate([batches[0, step].rows.numpy() for step in range(20)])
        assert len(np.unique(rows // 10)) < 0.6 * 500 / 10


def test_steps_of_texts_of_similar_length_stay_near_their_blocks() -> None:
    lengths = np.random.default_rng(0).integers(1, 41, 2000)
    inputs = (np.arange(40) < lengths[:, None]).astype(np.int32)
    ids = split_of(2000).ids
    split = packed_split(inputs, np.zeros(2000), ids, ids)
    further: dict[str, Any] = {"splits": [split], "blocks": BlockShuffle(40, 480), "buckets": True}
    steps = _steps(**further)
    assert steps == _steps(world_size=3, limit=4, **further)
    for begin in range(0, 80, 20):
        rows = np.concatenate(steps[begin : begin + 20])
        assert len(np.unique(rows // 40)) <= 480 // 40 + 1
    padded = 1 - sum(lengths[step].sum() for step in steps) / sum(
        24 * lengths[step].max() for step in steps
    )
    assert padded < 0.2


def _mapped(folder: Path, split: PackedSplit) -> PackedSplit:
    path = folder / "inputs.npy"
    np.save(path, split.inputs[:])
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # only clean pages can be dropped
    mapped = np.load(path, mmap_mode="r")
    return packed_split(mapped, split.targets, split.ids, split.sources)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_a_resumed_block_shuffled_epoch_continues_with_the_next_batch(
    tmp_path: Path, num_workers: int
) -> None:
    changes = ImageChanges(plan_from_params(augment_params(**ON), seed=3), 8, on_device=False)
    splits = [_mapped(tmp_path, SPLITS[0])]
    whole = list(training_loader(_batches(splits=splits, changes=changes), 0))
    rest = list(
        training_loader(_batches(splits=splits, changes=changes), num_workers, first_batch=9)
    )
    assert len(rest) == len(whole) - 9
    for batch, expected in zip(rest, whole[9:], strict=True):
        assert batch.rows.tolist() == expected.rows.tolist()
        assert np.array_equal(batch.inputs, expected.inputs)


def test_batches_from_shuffled_blocks_hold_the_pixels_of_their_rows(tmp_path: Path) -> None:
    mapped = _mapped(tmp_path, SPLITS[0])
    batches = _batches(splits=[mapped, SPLITS[1]])
    both = np.concatenate([SPLITS[0].inputs, SPLITS[1].inputs])
    for step in range(20):
        batch = batches[1, step]
        assert np.array_equal(batch.inputs.numpy(), both[batch.rows.numpy()])


def _cached_blocks(mapped: Any) -> list[bool]:
    """Return for each MiB of a mapped file if its middle page is in the page cache."""
    found, page = ctypes.create_string_buffer(1), mmap.PAGESIZE
    cached = []
    for middle in range(1 << 19, mapped.nbytes, 1 << 20):
        address = ctypes.c_void_p((mapped.ctypes.data + middle) & -page)
        if ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(page), found):
            pytest.skip(f"the system does not say what is cached: errno {ctypes.get_errno()}")
        cached.append(bool(found.raw[0] & 1))
    return cached


def _await_cached(mapped: Any, expected: list[bool]) -> None:
    """Wait until exactly these MiB are cached; threads drop blocks beside the caller."""
    end = time.monotonic() + 10
    while _cached_blocks(mapped) != expected and time.monotonic() < end:
        time.sleep(0.001)
    assert _cached_blocks(mapped) == expected


def _four_mib(folder: Path) -> tuple[PackedSplit, Any]:
    """Write images of 4 MiB that are not in the page cache; return them mapped and in memory."""
    images = np.arange(64 * 4096 * 4, dtype=np.uint32).view(np.uint8).reshape(64, 128, 128, 4)
    split = _mapped(folder, packed_split(images, np.zeros(64), *[split_of(64).ids] * 2))
    path = folder / "inputs.npy"
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if any(_cached_blocks(split.inputs)):
        pytest.skip(f"the file system of {path} keeps all files in memory")
    return split, images


def test_blocks_are_read_before_use_and_dropped_after_it(tmp_path: Path) -> None:
    split, images = _four_mib(tmp_path)
    ahead = ReadAhead([split.inputs], block=16)
    ahead.move("first", np.array([17]), np.empty(0, np.int64))
    ahead.wait()
    assert _cached_blocks(split.inputs) == [False, True, False, False]
    assert np.array_equal(split.inputs[16:32], images[16:32])
    ahead.move("second", np.array([40]), np.array([63]))
    ahead.wait()
    _await_cached(split.inputs, [False, False, True, True])
    ahead.move("third", np.array([63]), np.empty(0, np.int64))
    ahead.wait()
    _await_cached(split.inputs, [False, False, False, True])
    assert np.array_equal(split.inputs[:], images)


def test_a_block_that_holds_a_huge_page_is_read_and_dropped_whole(tmp_path: Path) -> None:
    split, images = _four_mib(tmp_path)
    nothing = np.empty(0, np.int64)
    ahead = ReadAhead([split.inputs], block=64)  # the bytes from 128 to 4 MiB + 128
    ahead.move("first", np.array([5]), nothing)
    ahead.wait()
    assert _cached_blocks(split.inputs) == [True] * 4
    assert np.array_equal(split.inputs[:], images)
    ahead.move("second", nothing, nothing)
    _await_cached(split.inputs, [False] * 4)


def test_blocks_that_are_no_longer_wanted_while_they_are_read_are_dropped(tmp_path: Path) -> None:
    split, images = _four_mib(tmp_path)
    ahead = ReadAhead([split.inputs], block=9)  # no block begins in the middle of a MiB
    generator = np.random.default_rng(0)
    for place in range(40):
        ahead.move(place, *generator.integers(0, 64, (2, 3)))
        if place % 5 == 0:
            ahead.wait()
    ahead.move("last", np.arange(32, 48), np.empty(0, np.int64))
    ahead.wait()
    _await_cached(split.inputs, [False, False, True, False])
    assert np.array_equal(split.inputs[:], images)


def test_error_names_a_file_that_was_truncated_while_blocks_are_read(tmp_path: Path) -> None:
    split = _mapped(tmp_path, SPLITS[0])
    ahead = ReadAhead([split.inputs], block=100)
    os.truncate(tmp_path / "inputs.npy", 20_000)
    ahead.move("first", np.array([350]), np.empty(0, np.int64))
    with pytest.raises(
        IntegrityError, match=r"inputs\.npy ends after 20000 bytes, expected at least"
    ):
        ahead.wait()


def test_waiting_for_a_block_of_an_unreadable_file_raises_an_error(tmp_path: Path) -> None:
    split = _mapped(tmp_path, SPLITS[0])
    (tmp_path / "inputs.npy").unlink()
    ahead = ReadAhead([split.inputs], block=100)
    ahead.move("first", np.array([350]), np.empty(0, np.int64))
    with pytest.raises(FileNotFoundError, match=r"inputs\.npy"):
        ahead.wait()


def test_file_span_gives_the_bytes_of_rows_stored_as_jpeg(tmp_path: Path) -> None:
    jpegs = [encode_jpeg(image, 90) for image in SPLITS[0].inputs[:5]]
    (tmp_path / "inputs.jpeg").write_bytes(b"".join(jpegs))
    np.save(tmp_path / "offsets.npy", np.cumsum([0, *map(len, jpegs)]))
    inputs = JpegInputs(tmp_path, (8, 8, 1))
    span = file_span(inputs, 1, 3)
    assert span is not None
    assert span.path.read_bytes()[span.begin : span.end] == jpegs[1] + jpegs[2]
    assert stored_bytes(inputs) == sum(map(len, jpegs))


def test_arrays_in_memory_are_shuffled_in_blocks_without_reading_ahead() -> None:
    assert file_span(np.zeros((5, 2)), 0, 5) is None
    assert len(_steps()) == 500 // 24


def test_half_of_the_buffer_is_shuffled_together_in_at_least_eight_blocks() -> None:
    rows = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (10**6, 2**17), (0, 0))
    assert block_shuffle([rows], 1024) == BlockShuffle(block=64, window=4096)
    assert block_shuffle([rows], 16) == BlockShuffle(block=8, window=64)
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (100, 2**26), (0, 0))
    assert block_shuffle([huge], 16) == BlockShuffle(block=1, window=1)


@pytest.mark.nightly(seconds=60)
def test_a_killed_training_with_block_shuffling_ends_with_the_same_bits(tmp_path: Path) -> None:
    settings = {"epochs": 2, "shuffle": "blocks", "shuffle_buffer_mib": 1, **EVERY_STEP}
    whole, killed = (write_project(tmp_path / name, **settings) for name in ("whole", "killed"))
    code, output = run_forked(whole)
    assert code == 0, output
    assert "order     blocks of 1,024 rows, of which 8,192 rows are shuffled" in output
    assert run_forked(killed, kill_after_checkpoint, 3)[0] == -9
    assert run_forked(killed)[0] == 0
    assert weights_digest(killed) == weights_digest(whole)
