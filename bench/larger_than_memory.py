"""Measures training batches from a store four times larger than the memory of the process.

`python -m bench.larger_than_memory` writes a store of 4 GiB to .work/bench/larger_than_memory, and
runs the cases in turns, each in a new process. A control group limits the process and its page
cache to 1 GiB. A second one slows the disk down to 100 MB/s and 400 reads per second, like a disk
on a network. Both need root and version 1 of control groups. The file is dropped from the page
cache (`posix_fadvise`) before each run. The results are written after each round, so a run that is
cut off keeps its rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.conditions import conditions
from slipway.system import files

SCRATCH = Path(".work/bench/larger_than_memory")
RESULT = Path("bench/results/larger_than_memory.md")
STORE = SCRATCH / "inputs.npy"
STORED_PX, SIZE_PX, BATCH = 256, 224, 64
NUM_ROWS = (4 << 30) // (STORED_PX * STORED_PX * 3)
LIMIT, BUFFER_MIB = 1 << 30, 384
SLOW_BYTES, SLOW_READS = 100_000_000, 400  # per second
GROUPS = Path("/sys/fs/cgroup")


class Case(NamedTuple):
    """A row of the tables: an order of reading, with or without limits."""

    name: str
    order: str  # rows, blocks, or file for a plain read
    is_limited: bool
    is_slow: bool


Found = Mapping[Case, list[dict[str, Any]]]

CASES = [
    Case("in memory, shuffled rows", "rows", False, False),
    Case("1 GiB of memory, shuffled blocks", "blocks", True, False),
    Case("1 GiB of memory, shuffled rows", "rows", True, False),
    Case("the file read from its begin to its end", "file", True, False),
    Case("1 GiB of memory, slow disk, shuffled blocks", "blocks", True, True),
    Case("1 GiB of memory, slow disk, shuffled rows", "rows", True, True),
    Case("slow disk, the file read from its begin to its end", "file", True, True),
]


def write_store() -> None:
    """Write a store of random pixels; no two rows are equal."""
    if STORE.exists():
        return
    import numpy as np

    SCRATCH.mkdir(parents=True, exist_ok=True)
    unfinished = SCRATCH / "unfinished.npy"
    shape = (NUM_ROWS, STORED_PX, STORED_PX, 3)
    rows = np.lib.format.open_memmap(unfinished, "w+", np.uint8, shape)
    generator = np.random.default_rng(0)
    for begin in range(0, NUM_ROWS, 256):
        part = rows[begin : begin + 256]
        part[:] = generator.integers(0, 256, part.shape, dtype=np.uint8)
    rows.flush()
    unfinished.replace(STORE)


def drop() -> None:
    """Drop the store from the page cache."""
    with STORE.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm() -> None:
    """Read the store into the page cache."""
    with STORE.open("rb") as file:
        while file.read(1 << 24):
            pass


@contextmanager
def control_group(kind: str, limits: dict[str, str]) -> Iterator[Path]:
    """Create a control group (version 1) with these limits for the `with` block."""
    folder = GROUPS / kind / f"slipway-bench-{os.getpid()}"
    folder.mkdir()
    try:
        for name, value in limits.items():
            (folder / name).write_text(value)
        yield folder
    finally:
        folder.rmdir()


def run(case: Case, max_seconds: float) -> dict[str, Any]:
    """Run a case in a process within its control groups, and return what it measured."""
    drop() if case.is_limited else warm()
    memory = {"memory.limit_in_bytes": str(LIMIT)} if case.is_limited else {}
    device = STORE.stat().st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    slow = {
        "blkio.throttle.read_bps_device": f"{disk} {SLOW_BYTES}",
        "blkio.throttle.read_iops_device": f"{disk} {SLOW_READS}",
    }
    with (
        control_group("memory", memory) as memory_group,
        control_group("blkio", slow if case.is_slow else {}) as disk_group,
    ):
        command = [sys.executable, "-m", "bench.larger_than_memory"]
        command += ["--inside", case.order, "--seconds", str(max_seconds)]
        joined = {"SLIPWAY_BENCH_GROUPS": f"{memory_group}:{disk_group}"}
        done = subprocess.run(
            command, env=os.environ | joined, check=True, capture_output=True, text=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(order: str, max_seconds: float) -> None:
    """Measure one epoch, or as much as the time allows, in this process."""
    groups = [Path(name) for name in os.environ["SLIPWAY_BENCH_GROUPS"].split(":")]
    for group in groups:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    if order == "file":
        # Into one buffer: new memory for each read would take longer than the disk.
        buffer, begin, count = bytearray(1 << 23), time.perf_counter(), 0
        with STORE.open("rb", buffering=0) as file:
            while (part := file.readinto(buffer)) and time.perf_counter() - begin < max_seconds:
                count += part
        print(json.dumps({"mb_per_second": count / 1e6 / (time.perf_counter() - begin)}))
        return
    epoch = batches(order)
    memory, faults = [], batch_faults()
    begin, count, last = time.perf_counter(), 0, 0.0
    for size in epoch:
        count += size
        now = time.perf_counter() - begin
        if now - last > 0.25:
            memory.append(used_bytes(groups[0]))
            last = now
        if now > max_seconds:
            break
    seconds = time.perf_counter() - begin
    quarter = max(1, len(memory) // 4)
    found = {
        "images_per_second": count / seconds,
        "mb_per_second": count * STORED_PX * STORED_PX * 3 / 1e6 / seconds,
        "faults": batch_faults() - faults,
        "first": max(memory[quarter : 2 * quarter], default=0),
        "last": max(memory[-quarter:], default=0),
    }
    print(json.dumps(found))


def batches(order: str) -> Iterator[int]:
    """Yield the number of rows of each batch of an epoch, after the batch was made."""
    import numpy as np

    from slipway.data.augmentation.plan import plan_from_params
    from slipway.system.malloc import keep_freed_pages
    from slipway.training.batches.batches import (
        ImageChanges,
        TrainingBatches,
        cut_step,
        training_loader,
    )
    from slipway.training.batches.shuffled_blocks import block_shuffle
    from tests.packed_rows import packed_split
    from tests.project_params import augment_params

    keep_freed_pages()  # as training does
    ids = [files.sha256_bytes(str(number).encode())[:32] for number in range(NUM_ROWS)]
    split = packed_split(np.load(STORE, mmap_mode="r"), np.zeros(NUM_ROWS), sorted(ids), ids)
    plan = plan_from_params(augment_params(horizontal_flip=0.5, random_resized_crop=[0.08, 1.0]), 7)
    made = TrainingBatches(
        [split],
        cut_step(BATCH, 1, BATCH),
        rank=0,
        seed=7,
        changes=ImageChanges(plan, SIZE_PX, on_device=False),
        target_dtype="int64",
        blocks=block_shuffle([split.inputs], BUFFER_MIB) if order == "blocks" else None,
    )
    return (len(batch.inputs) for batch in training_loader(made, 0))


def batch_faults() -> int:
    """Return how often the threads that make batches, not those that read ahead, met the disk."""
    readers = {one.native_id for one in threading.enumerate() if one.name == "slipway-read-ahead"}
    others = [task for task in Path("/proc/self/task").iterdir() if int(task.name) not in readers]
    return sum(int((task / "stat").read_text().rpartition(")")[2].split()[9]) for task in others)


def used_bytes(group: Path) -> int:
    """Return the memory of a control group: its processes and their page cache."""
    return int((group / "memory.usage_in_bytes").read_text())


def report(rounds: Found, max_seconds: float, loads: list[float]) -> str:
    """Format the rounds so far as a page."""
    lines = [
        "| Case | images/s, median | lowest to highest | MB/s, median | lowest to highest "
        "| pages read by faults | memory in the second and the last quarter, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, found in rounds.items():
        rates = _median_and_range(one["mb_per_second"] for one in found)
        if case.order == "file":
            lines.append(f"| {case.name} | | | {rates} | | |")
            continue
        images = _median_and_range(one["images_per_second"] for one in found)
        faults = statistics.median(one["faults"] for one in found)
        first, last = (max(one[name] for one in found) / 1e6 for name in ("first", "last"))
        memory = f"{first:,.0f}, {last:,.0f}" if case.is_limited else ""
        lines.append(f"| {case.name} | {images} | {rates} | {faults:,.0f} | {memory} |")
    in_memory, blocks, rows, plain, slow_blocks, slow_rows, slow_file = CASES
    note = (
        f"Shuffled blocks give {_ratio(rounds, blocks, in_memory, '.0%')} of the images/s of the "
        f"store in memory, {_ratio(rounds, blocks, plain, '.0%')} of the disk's sequential rate, "
        f"and on the slow disk {_ratio(rounds, slow_blocks, slow_file, '.0%')} of its sequential "
        f"rate. They are {_ratio(rounds, blocks, rows, '.1f')} times as fast as "
        "shuffled rows in the same memory, and "
        f"{_ratio(rounds, slow_blocks, slow_rows, '.1f')} times on the slow disk. Each is the "
        "median of the rounds' ratios, with the lowest and the highest."
    )
    setting = (
        f"A store of {NUM_ROWS:,} images of {STORED_PX} px, 4 GiB; batches of {BATCH}, random "
        f"resized crop to {SIZE_PX} px and flip, in the trainer's process, nothing else computed. "
        f"The process and its page cache have 1 GiB (control group), of which "
        f"`train.shuffle_buffer_mib` is {BUFFER_MIB}. The file was dropped from the page cache "
        f"before each run. The slow disk is the same one behind a limit of 100 MB/s and "
        f"{SLOW_READS} reads per second. n = {len(loads)} rounds in turns, of one epoch or "
        f"{max_seconds:g} s; memory is the largest of all rounds. Load average at the begin of the "
        f"rounds: {', '.join(f'{load:.1f}' for load in loads)}."
    )
    return "\n\n".join(
        ["# A store larger than memory", setting, "\n".join(lines), note, conditions("numpy")]
    )


def _median_and_range(values: Iterable[float]) -> str:
    """Format as two cells of a table."""
    found = list(values)
    return f"{statistics.median(found):,.0f} | {min(found):,.0f} to {max(found):,.0f}"


def _ratio(rounds: Found, case: Case, other: Case, form: str) -> str:
    """Format the ratio of the rates of two cases by round."""
    pairs = zip(rounds[case], rounds[other], strict=True)
    found = [one["mb_per_second"] / two["mb_per_second"] for one, two in pairs]
    return f"{statistics.median(found):{form}} ({min(found):{form}} to {max(found):{form}})"


def main() -> None:
    """Run every case in turns, and write the page after each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a run, at most")
    parser.add_argument("--inside", choices=("rows", "blocks", "file"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        measure(given.inside, given.seconds)
        return
    write_store()
    rounds: dict[Case, list[dict[str, Any]]] = {case: [] for case in CASES}
    loads = []
    for number in range(given.rounds):
        loads.append(os.getloadavg()[0])
        for case in CASES:
            rounds[case].append(run(case, given.seconds))
            print(number, case.name, rounds[case][-1], flush=True)
        files.write_text(RESULT, report(rounds, given.seconds, loads) + "\n")
    print(report(rounds, given.seconds, loads))


if __name__ == "__main__":
    main()
