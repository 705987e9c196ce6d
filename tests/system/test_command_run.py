import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipway.system.command_run import run_command
from tests.conftest import ROOT

_BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
_UNREAD = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from slipway.system.command_run import run_command
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
