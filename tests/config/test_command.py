import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipway.config.command import run_command, run_stage
from slipway.config.params import Params
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


_BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
_UNREAD = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from slipway.config.command import run_command
"""


def _piped(code: str, **unread: bool) -> subprocess.Popen[bytes]:
    """Start a process whose named streams are pipes that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        streams: dict[str, Any] = {
            name: write if is_unread else subprocess.PIPE for name, is_unread in unread.items()
        }
        return subprocess.Popen([sys.executable, "-c", _UNREAD + code], env=_BUFFERED, **streams)
    finally:
        os.close(write)


@pytest.mark.parametrize(
    "code",
    [
        "run_command(lambda: print('one line, which is still buffered at the end'))",
        "run_command(lambda: print('x' * 1_000_000))",
        "run_command(lambda: print('x', flush=True))",
        "run_command(lambda: sys.exit(print('as --help does')))",
    ],
)
def test_a_command_with_a_closed_output_pipe_ends_silently(code: str) -> None:
    with _piped(code, stdout=True, stderr=False) as process:
        assert process.stderr
        assert (process.stderr.read(), process.wait()) == (b"", 128 + signal.SIGPIPE)


def test_a_command_with_a_closed_error_pipe_ends_silently() -> None:
    code = (
        "from slipway.system.errors import DataError\n"
        "def run():\n    raise DataError('no images')\nrun_command(run)"
    )
    with _piped(code, stderr=True) as process:
        assert process.wait() == 128 + signal.SIGPIPE


def test_an_error_is_reported_even_if_the_output_pipe_is_closed() -> None:
    code = (
        "from slipway.system.errors import DataError\n"
        "def run():\n    print('x')\n    raise DataError('no images')\nrun_command(run)"
    )
    with _piped(code, stdout=True, stderr=False) as process:
        assert process.stderr
        assert b"error: no images" in process.stderr.read()


def test_broken_pipe_other_than_the_output_keeps_its_traceback() -> None:
    def run() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        run_command(run)


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments",
    [
        ("slipway.serving.rollout", "status"),
        ("slipway.serving.rollout", "--help"),
        ("slipway.serving.auth.keys", "--help"),
        ("slipway.replay", "--help"),
    ],
)
def test_every_command_ends_silently_if_its_output_pipe_is_not_read(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = _BUFFERED | {"SLIPWAY_STATE": str(tmp_path)}
    with os.fdopen(write) as stdout:
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert done.returncode == 128 + signal.SIGPIPE


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
