"""Measures training batches from a store four times larger than the memory of the process.

`python -m bench.larger_than_memory` writes a store of 4 GiB to .work/bench/larger_than_memory, and
runs the cases in turns, each in a new process. A control group limits the process and its page
cache to 1 GiB. A second one slows the disk down to 100 MB/s and 400 reads per second, like a disk
on a network. Both need root and version 1 of control groups. The file is dropped from the page
cache (`posix_fadvise`) before each run.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
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
MAX_SECONDS = 15.0  # of a run
NUM_ROUNDS = 5
GROUPS = Path("/sys/fs/cgroup")
DISK = "254:0"


class Case(NamedTuple):
    """A row of the tables."""

    name: str
    order: str  # rows, blocks, or file for a plain read
    is_limited: bool
    is_slow: bool


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


def run(case: Case) -> dict[str, Any]:
    """Run a case in a process within its control groups, and return what it measured."""
    drop() if case.is_limited else warm()
    memory = {"memory.limit_in_bytes": str(LIMIT)} if case.is_limited else {}
    slow = {
        "blkio.throttle.read_bps_device": f"{DISK} {SLOW_BYTES}",
        "blkio.throttle.read_iops_device": f"{DISK} {SLOW_READS}",
    }
    with (
        control_group("memory", memory) as memory_group,
        control_group("blkio", slow if case.is_slow else {}) as disk_group,
    ):
        command = [sys.executable, "-m", "bench.larger_than_memory", case.order]
        joined = {"SLIPWAY_BENCH_GROUPS": f"{memory_group}:{disk_group}"}
        done = subprocess.run(
            command, env=os.environ | joined, check=True, capture_output=True, text=True
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(order: str) -> None:
    """Measure one epoch, or as much as the time allows, in this process."""
    groups = [Path(name) for name in os.environ["SLIPWAY_BENCH_GROUPS"].split(":")]
    for group in groups:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    if order == "file":
        begin, count = time.perf_counter(), 0
        with STORE.open("rb", buffering=0) as file:
            while (part := len(file.read(1 << 23))) and time.perf_counter() - begin < MAX_SECONDS:
                count += part
        print(json.dumps({"mb_per_second": count / 1e6 / (time.perf_counter() - begin)}))
        return
    epoch = batches(order)
    memory, faults = [], resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    begin, count, last = time.perf_counter(), 0, 0.0
    for size in epoch:
        count += size
        now = time.perf_counter() - begin
        if now - last > 0.25:
            memory.append(used_bytes(groups[0]))
            last = now
        if now > MAX_SECONDS:
            break
    seconds = time.perf_counter() - begin
    quarter = max(1, len(memory) // 4)
    found = {
        "images_per_second": count / seconds,
        "mb_per_second": count * STORED_PX * STORED_PX * 3 / 1e6 / seconds,
        "faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults,
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


def used_bytes(group: Path) -> int:
    """Return the memory of a control group: its processes and their page cache."""
    return int((group / "memory.usage_in_bytes").read_text())


def main() -> None:
    """Run every case in turns, and write the table."""
    write_store()
    rounds: dict[Case, list[dict[str, Any]]] = {case: [] for case in CASES}
    for number in range(NUM_ROUNDS):
        for case in CASES:
            rounds[case].append(run(case))
            print(number, case.name, rounds[case][-1], flush=True)
    lines = [
        "| Case | images/s, median | lowest | highest | MB/s | pages read by faults | "
        "memory in the second and the last quarter, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, found in rounds.items():
        rate = statistics.median(one["mb_per_second"] for one in found)
        if case.order == "file":
            lines.append(f"| {case.name} | | | | {rate:,.0f} | | |")
            continue
        images = [one["images_per_second"] for one in found]
        faults = statistics.median(one["faults"] for one in found)
        first, last = (max(one[name] for one in found) / 1e6 for name in ("first", "last"))
        memory = f"{first:,.0f}, {last:,.0f}" if case.is_limited else ""
        lines.append(
            f"| {case.name} | {statistics.median(images):,.0f} | {min(images):,.0f} | "
            f"{max(images):,.0f} | {rate:,.0f} | {faults:,.0f} | {memory} |"
        )
    medians = {
        case: statistics.median(one["mb_per_second"] for one in found)
        for case, found in rounds.items()
    }
    in_memory, fast, _, _, slow, _, slow_file = (medians[case] for case in CASES)
    note = (
        f"Shuffled blocks give {fast / in_memory:.0%} of the images/s of the store in memory, and "
        f"on the slow disk {slow / slow_file:.0%} of its sequential rate."
    )
    setting = (
        f"A store of {NUM_ROWS:,} images of {STORED_PX} px, 4 GiB; batches of {BATCH}, random "
        f"resized crop to {SIZE_PX} px and flip, in the trainer's process, nothing else computed. "
        f"The process and its page cache have 1 GiB (control group), of which "
        f"`train.shuffle_buffer_mib` is {BUFFER_MIB}. The file was dropped from the page cache "
        f"before each run. The slow disk is the same one behind a limit of 100 MB/s and "
        f"{SLOW_READS} reads per second. n = {NUM_ROUNDS} rounds in turns, of one epoch or "
        f"{MAX_SECONDS:.0f} s; memory is the largest of all rounds."
    )
    text = "\n\n".join(
        ["# A store larger than memory", setting, "\n".join(lines), note, conditions("numpy")]
    )
    files.write_text(RESULT, text + "\n")
    print(text)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        main()
