"""Tests of the folder of unfinished work: it survives interruptions, and is locked."""

import subprocess
import sys
from pathlib import Path

import pytest

from slipway.data.engine.work_folder import work_folder
from slipway.system.errors import LockedError

HOLD = """
import sys
from pathlib import Path
from slipway.data.engine.work_folder import work_folder
with work_folder(Path(sys.argv[1]), "key", "precompute"):
    print("held", flush=True)
    sys.stdin.read()
"""


def stop(root: Path, key: str) -> None:
    """Begin work in the folder, then interrupt it."""

    def work() -> None:
        with work_folder(root, key, "precompute") as folder:
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()


def test_the_work_folder_keeps_interrupted_work_and_removes_finished_work(tmp_path: Path) -> None:
    stop(tmp_path / "work", "key")
    with work_folder(tmp_path / "work", "key", "precompute") as folder:
        assert (folder / "half").exists()
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["lock"]


def test_the_work_folder_removes_work_with_a_different_key(tmp_path: Path) -> None:
    stop(tmp_path, "old")
    assert (tmp_path / "old").is_dir()
    with work_folder(tmp_path, "new", "precompute"):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "new"]


@pytest.mark.process
def test_a_second_process_cannot_open_the_work_folder_and_removes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        message = f"precompute is already running as process {holder.pid}"
        with (
            pytest.raises(LockedError, match=message),
            work_folder(tmp_path, "other", "precompute"),
        ):
            pass
        assert (tmp_path / "key").is_dir()
        holder.kill()
    with work_folder(tmp_path, "other", "precompute"):
        assert not (tmp_path / "key").exists()
