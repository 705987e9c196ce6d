"""GPUs among trials, with a made-up list of devices: each is held by one trial at a time."""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from slipway.search.gpus import VISIBLE, lock_path, reserved_gpus, visible_gpus

GPUS = ["0", "1", "GPU-5e"]


@pytest.fixture(autouse=True)
def _own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_trials_at_the_same_time_have_different_gpus() -> None:
    stop = threading.Event()
    with reserved_gpus(GPUS, 2, stop) as first, reserved_gpus(GPUS, 1, stop) as second:
        assert first is not None
        assert second is not None
        assert first.environment == {VISIBLE: "0,1"}
        assert second.environment == {VISIBLE: "GPU-5e"}
        assert len(first.locks) == 2
    with reserved_gpus(GPUS, 3, stop) as third:
        assert third is not None
        assert third.names == GPUS, "all are free again"


def test_a_trial_waits_until_a_gpu_is_free_and_ends_with_the_search() -> None:
    stop, started = threading.Event(), threading.Event()
    found = []

    def trial() -> None:
        started.set()
        with reserved_gpus(["0"], 1, stop) as gpus:
            found.append(gpus and gpus.names)

    with reserved_gpus(["0"], 1, stop):
        waiting = threading.Thread(target=trial)
        waiting.start()
        started.wait()
        assert found == []
    waiting.join()
    assert found == [["0"]]
    stop.set()
    with reserved_gpus(["0"], 1, stop) as gpus:
        assert gpus is None


def test_a_gpu_stays_locked_while_a_process_of_the_trial_uses_it() -> None:
    stop = threading.Event()
    with reserved_gpus(["0"], 1, stop) as gpus:
        assert gpus is not None
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=gpus.locks
        )
    with reserved_gpus(["0", "1"], 1, stop) as others:
        assert others is not None
        assert others.names == ["1"], "the search is gone, its training is not"
    child.communicate(b"\n")
    with reserved_gpus(["0", "1"], 1, stop) as free:
        assert free is not None
        assert free.names == ["0"]


def test_requesting_more_gpus_uses_all_and_without_gpus_sets_no_variable() -> None:
    stop = threading.Event()
    with reserved_gpus(["0"], 4, stop) as gpus:
        assert gpus is not None
        assert gpus.names == ["0"]
    with reserved_gpus([], 1, stop) as nothing:
        assert nothing is not None
        assert nothing.environment == {}


def test_each_slurm_job_has_its_own_gpu_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    here = lock_path("0")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert lock_path("0") != here


def test_only_gpus_visible_to_the_search_are_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipway.search.gpus.why_no_cuda_driver", lambda: None)
    monkeypatch.setenv(VISIBLE, "2, 5")
    assert visible_gpus() == ["2", "5"]
    monkeypatch.setattr("slipway.search.gpus.why_no_cuda_driver", lambda: "no GPU")
    assert visible_gpus() == []
