import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from slipway.config.params import Params
from slipway.config.stage_run import run_stage
from slipway.system.errors import DataError
from tests.conftest import ROOT


def _exit_code(error: BaseException) -> int | str | None:
    def run(params: Params) -> None:
        raise error

    with pytest.raises(SystemExit) as raised:
        run_stage(run)
    return raised.value.code


def _caused_by(cause: Exception) -> Exception:
    error = TypeError("a library's own")
    error.__cause__ = cause
    return error


def _noted(error: Exception) -> Exception:
    error.add_note("(rank 1 of 2)")
    return error


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DataError("no images. Add some."), 1, "error: no images. Add some."),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data/packed"),
            1,
            "error: data/packed: No space left on device. Free space",
        ),
        (
            OSError(errno.EROFS, os.strerror(errno.EROFS), "artifacts"),
            1,
            "error: artifacts: Read-only file system. Run in",
        ),
        (
            PermissionError(errno.EACCES, os.strerror(errno.EACCES), "reports"),
            1,
            "error: reports: Permission denied. Give",
        ),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "from", None, "to"),
            1,
            "error: to: No space left on device.",
        ),
        (
            OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            1,
            f"error: the file system of {Path.cwd()}: No space left on device.",
        ),
        (
            OSError(errno.EFBIG, os.strerror(errno.EFBIG), "a/b"),
            1,
            "error: a/b: File too large. Raise the limit",
        ),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 4288 vs 4180"),
            1,
            "No space left on device. Free space",
        ),
        (
            ValueError("I/O error: No space left on device (os error 28)"),
            1,
            "No space left on device. Free space",
        ),
        (
            ValueError("cannot write 'artifacts/x.onnx': Read-only file system"),
            1,
            "error: artifacts/x.onnx: Read-only file system.",
        ),
        (
            _caused_by(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data/x")),
            1,
            "error: data/x: No space left on device.",
        ),
        (
            _noted(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data/x")),
            1,
            "run the same command again. (rank 1 of 2)",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted."),
    ],
)
def test_stage_prints_an_error_that_the_user_can_fix_as_one_message(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str
) -> None:
    assert _exit_code(error) == code
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("ours"),
        OSError(errno.EBADF, "Bad file descriptor"),
        RuntimeError("shapes"),
    ],
)
def test_stage_prints_the_traceback_of_an_internal_error(error: Exception) -> None:
    def run(params: Params) -> None:
        raise error

    with pytest.raises(type(error)):
        run_stage(run)


def test_error_names_a_folder_without_params_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run_stage(lambda params: None)
    assert "params.yaml is missing" in capsys.readouterr().err


def test_an_unwritable_disk_is_reported_before_the_work_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params.yaml").write_bytes(Path("params.yaml").read_bytes())
    (tmp_path / "artifacts").mkdir()
    monkeypatch.chdir(tmp_path)
    ran: list[Params] = []
    run_stage(ran.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(SystemExit):
            run_stage(ran.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(ran) == 1
    assert f"error: {tmp_path / 'artifacts'}: File too large." in capsys.readouterr().err


@pytest.mark.process
def test_threads_of_a_stage_sleep_while_waiting_even_outside_a_clone() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", "import slipway.stages.train, torch"],
        cwd=ROOT,
        env=environment | {"OMP_DISPLAY_ENV": "true"},  # OpenMP prints what it has read
        capture_output=True,
        text=True,
        check=True,
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
