import errno
import os
from pathlib import Path

import pytest

from slipway.command import run_stage
from slipway.errors import DataError
from slipway.params import Params


def _exit_code(error: BaseException) -> int | str | None:
    def run(params: Params) -> None:
        raise error

    with pytest.raises(SystemExit) as raised:
        run_stage(run)
    return raised.value.code


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DataError("no images. Add some."), 1, "error: no images. Add some."),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "data/packed"), 1, "error: data/packed: No space left on device. Free space"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "artifacts"), 1, "error: artifacts: Read-only file system. Run in"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "reports"), 1, "error: reports: Permission denied. Give"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "from", None, "to"), 1, "error: to: No space left on device."),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "error: the file system: No space left on device."),
        (KeyboardInterrupt(), 130, "error: interrupted."),
    ],
)
def test_what_a_user_can_mend_is_one_message(capsys: pytest.CaptureFixture[str], error: BaseException, code: int, text: str) -> None:
    assert _exit_code(error) == code
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), OSError(errno.EBADF, "Bad file descriptor")])
def test_a_fault_of_ours_keeps_its_traceback(error: Exception) -> None:
    def run(params: Params) -> None:
        raise error

    with pytest.raises(type(error)):
        run_stage(run)


def test_a_folder_without_params_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run_stage(lambda params: None)
    assert "params.yaml is missing" in capsys.readouterr().err
