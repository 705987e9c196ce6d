"""If one rank fails, all ranks end within seconds, and the cause is reported once."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from pytorch_lightning.strategies.launchers import subprocess_script

from slipway.system.errors import IntegrityError, TrainingError
from slipway.training.distributed.faults import explain, is_lost_rank
from slipway.training.distributed.processes import report_error_once
from tests import warm_starts
from tests.training import test_table_runs
from tests.training.real_runs import environment
from tests.training.text_projects import write_text_project

MODULE = "tests.training.failing_training"
LIGHTNING = [sys.executable, "-u", "-m", MODULE]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node=2",
    "-m",
    MODULE,
]
WORKER = "DataLoader worker (pid 71) is killed by signal: "


def _living_processes(project: Path) -> list[int]:
    """Return the living processes of a training, which have the project as working directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink() == project and (
                    entry / "stat"
                ).read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _fail(project: Path, command: list[str], fault: str) -> tuple[int, float, str]:
    """Start a training that fails; return exit code, relative time to end, and output.

    The time from the fault to the end is divided by the time from the start to the fault.
    """
    started_at, variables = time.monotonic(), {**environment(), "FAIL": fault}
    with subprocess.Popen(
        command,
        cwd=project,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said, failed_at = "", 0.0
        for line in process.stdout:
            if line == "failing\n":
                failed_at = time.monotonic()
            said += line
        code = process.wait(60)
    assert failed_at, said
    while _living_processes(project):
        time.sleep(0.1)
    return code, (time.monotonic() - failed_at) / (failed_at - started_at), said


@pytest.fixture(name="project")
def _project(tmp_path: Path) -> Iterator[Path]:
    project = test_table_runs.write_project(
        tmp_path / "project", devices=2, strategy="ddp", epochs=200
    )
    yield project
    for process in _living_processes(project):
        os.kill(process, 9)


CAUSES = [
    ("1:kill", r"error: rank 1 \(process \d+\) was ended by SIGKILL\. .*All others were ended\.$"),
    (
        "1:segfault",
        r"error: rank 1 \(process \d+\) was ended by SIGSEGV\. All others were ended\.$",
    ),
    (
        "1:exit",
        r"error: rank 1 \(process \d+\) ended with exit code 7, for the reason above\. "
        r"All others were ended\.$",
    ),
    (
        "0:kill",
        r"error: rank 0 \(process \d+\) was killed\. All others end\.$",
    ),
    ("0:error", r"ZeroDivisionError: a fault of its own\n(\[rank0\]: )?\(rank 0 of 2\)$"),
    (
        "1:error",
        r"ZeroDivisionError: a fault of its own\n(\[rank1\]: )?\(rank 1 of 2\)\n\n"
        r"error: rank 1 .* exit code 1, for the reason above.*$",
    ),
    (
        "0:memory",
        r"error: rank 0 ran out of memory: CUDA out of memory. Tried to allocate 2.00 GiB. "
        r"Lower train.max_batch_per_device .*$",
    ),
    (
        "1:memory",
        r"error: rank 1 ran out of memory: CUDA out of memory.*\n\n"
        r"error: rank 1 .* exit code 1, for the reason above.*$",
    ),
    ("0:host memory", r"error: rank 0 ran out of memory: .*$"),
    (
        "1:disk",
        r"error: somewhere: No space left on device\. Free space there, .*\. \(rank 1 of 2\)\n\n"
        r"error: rank 1 .* exit code 1.*$",
    ),
]


@pytest.mark.process
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(fault, message, marks=[] if fault == "0:kill" else pytest.mark.nightly)
        for fault, message in CAUSES
    ],
)
def test_a_failing_rank_ends_all_ranks_and_its_cause_is_reported_last(
    project: Path, fault: str, message: str, is_nightly: bool
) -> None:
    code, relative_time, said = _fail(project, LIGHTNING, fault)
    assert code == (-9 if fault == "0:kill" else 1)
    assert not is_nightly or relative_time < 1, (
        said
    )  # to start takes some 8 seconds on a quiet machine
    assert re.search(message, said.strip(), re.MULTILINE | re.DOTALL), said
    assert said.count("Traceback") == (1 if fault.endswith("error") else 0), said


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("1:kill", r"Signal 9 \(SIGKILL\)"),
        ("0:kill", r"Signal 9 \(SIGKILL\)"),
        ("1:error", r"ZeroDivisionError: a fault of its own\n(\[rank1\]: )?\(rank 1 of 2\)"),
        ("1:memory", "error: rank 1 ran out of memory: "),
    ],
)
def test_torchrun_ends_all_ranks_and_reports_the_failing_one(
    project: Path, fault: str, message: str
) -> None:
    code, relative_time, said = _fail(project, TORCHRUN, fault)
    assert code == 1
    assert relative_time < 1, said
    assert re.search(message, said), said
    root_cause = said[said.index("Root Cause") :]
    assert re.search(rf"rank\s+: {fault[0]} ", root_cause), said


@pytest.mark.process
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "1:hang",
            r"rank 1 on .* in the forward pass of step 3, at .*failing_training\.py:\d+ in .*; "
            r"the other ranks wait for it\.",
        ),
        pytest.param(
            "0:hang",
            r"rank 0 on .* in the forward pass of step 3, .*wait for it",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "1:stop", r"rank 1 gives no sign of life, and the other", marks=pytest.mark.nightly
        ),
        pytest.param(
            "0:stop", r"rank 0 gives no sign of life, and the other", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_hanging_rank_is_reported_but_not_as_failed(
    project: Path, fault: str, message: str
) -> None:
    _see_the_hang_reported(project, fault, message)


@pytest.mark.nightly(seconds=60)
@pytest.mark.parametrize("strategy", ["fsdp", "tensor_parallel"])
def test_all_ranks_that_wait_in_the_same_forward_pass_are_reported_with_their_lines_of_code(
    tmp_path: Path, strategy: str
) -> None:
    project = write_text_project(tmp_path / "project", strategy=strategy, devices=2, epochs=20)
    try:
        # Rank 0 waits within its forward pass for the weights or values of rank 1.
        message = (
            r"rank 0 on .* in the forward pass of step 3, at .*; rank 1 on .* in the forward pass "
            r"of step 3, at .*failing_training\.py:\d+ in .*; no rank is ahead"
        )
        _see_the_hang_reported(project, "1:hang", message)
    finally:
        for process in _living_processes(project):
            os.kill(process, 9)


def _see_the_hang_reported(project: Path, fault: str, message: str) -> None:
    with warm_starts.start([MODULE], project, {**environment(), "FAIL": fault}) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        assert any(line == "failing\n" for line in lines)
        watch = threading.Timer(60, process.kill)
        watch.start()
        assert any(re.match(f"stalled .*{message}", line) for line in lines)
        watch.cancel()
        assert process.poll() is None
        process.kill()


def test_lightning_still_starts_the_observer_that_the_watch_replaces() -> None:
    assert callable(subprocess_script._launch_process_observer)  # type: ignore[attr-defined]
    assert (
        "_launch_process_observer"
        in subprocess_script._SubprocessScriptLauncher.launch.__code__.co_names
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried"),
            "rank 3 ran out of memory: CUDA out of memory. Tried. Lower train.max_batch",
        ),
        (MemoryError(), "rank 3 ran out of memory: MemoryError"),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
            ),
            "rank 3 ran out of memory",
        ),
        (
            RuntimeError(WORKER + "Killed. "),
            r"a loader process of rank 3 \(71\) was killed by a signal \(Killed\)"
            r".*lower train.num_workers",
        ),
        (
            RuntimeError(WORKER + "Bus error. It is possible"),
            r"\(71\) ended by a bus error: a file that is mapped .* or /dev/shm is full",
        ),
        (
            RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
            r"of rank 3 \(7, 8\) ended without a message",
        ),
        (
            RuntimeError("unable to write to file </torch_7>: No space left on device (28)"),
            "no shared memory .* Enlarge /dev/shm",
        ),
        (
            RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:9"),
            "rank 3 lost the connection to another rank",
        ),
        (
            RuntimeError(
                "[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
            ),
            "rank 3 waited 30 minutes for another rank, .* The line `stalled` above names it",
        ),
        (
            IntegrityError(
                "Caught IntegrityError in DataLoader worker process 1.\nTrace\n"
                "x.IntegrityError: a is b\n"
            ),
            "loader process 1: a is b",
        ),
    ],
)
def test_known_external_faults_become_a_one_line_training_error(
    error: Exception, message: str
) -> None:
    found = explain(error, "rank 3")
    assert isinstance(found, TrainingError)
    assert re.search(message, str(found))
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shapes differ"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        OSError(9, "bad"),
    ],
)
def test_unknown_training_errors_are_returned_unchanged(error: Exception) -> None:
    assert explain(error, "rank 3") is error
    assert not is_lost_rank(error)


def test_error_messages_of_several_ranks_name_the_rank() -> None:
    for world_size, notes in ((1, []), (2, ["(rank 0 of 2)"])):
        with pytest.raises(ZeroDivisionError) as raised, report_error_once(0, world_size):
            raise ZeroDivisionError("ours")
        assert getattr(raised.value, "__notes__", []) == notes


TRUNCATED = """
import os, sys
import numpy as np
from slipway.training.distributed.faults import report_bus_errors
if sys.argv[2] == "explained":
    report_bus_errors()
mapped = np.load(sys.argv[1], mmap_mode="r")
os.truncate(sys.argv[1], 4096)
mapped[np.arange(len(mapped))].sum()
"""


@pytest.mark.process
@pytest.mark.parametrize(("explanation", "code"), [("explained", 1), ("", -7)])
def test_a_truncated_mapped_file_ends_with_a_message_instead_of_a_bus_error(
    tmp_path: Path, explanation: str, code: int
) -> None:
    path = tmp_path / "inputs.npy"
    np.save(path, np.zeros((4096, 64), dtype=np.uint8))
    ended = subprocess.run(
        [sys.executable, "-c", TRUNCATED, str(path), explanation], capture_output=True, text=True
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count("error: a file that is mapped into memory was truncated") == (
        code == 1
    )


@pytest.mark.nightly(seconds=16)
def test_a_killed_loader_process_is_reported_in_one_message(tmp_path: Path) -> None:
    project = test_table_runs.write_project(tmp_path / "project", num_workers=2, epochs=200)
    variables = {**environment(), "FAIL": "9:kill"}
    with subprocess.Popen(
        LIGHTNING,
        cwd=project,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any("epoch   1" in line for line in process.stdout)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        loaders = [
            child
            for child in children
            if "failing_training" in Path(f"/proc/{child}/cmdline").read_text()
        ]
        os.kill(int(loaders[0]), 9)
        said = process.stdout.read()
    assert process.returncode == 1
    # torch names the signal unless Python has read the exit code of the process before it.
    how = r"(was killed by a signal \(Killed\)|ended without a message)\. Unless somebody killed it"
    assert re.search(rf"error: a loader process of the training \({loaders[0]}\) {how}", said), said
    assert "Traceback" not in said
