"""`slipway upgrade` in a project of an older version."""

import io
import sys
from pathlib import Path

import pytest

from slipway.cli.command import main
from slipway.config.params import load_params
from tests.upgrade.test_project import PARAMS_0, copy_version_0

pytestmark = pytest.mark.unit


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, a project of version 0."""
    copy_version_0(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Terminal(io.StringIO):
    """Standard input of a person who types."""

    def isatty(self) -> bool:
        return True


def test_upgrade_without_a_terminal_and_without_yes_writes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    main(["upgrade"])
    shown = capsys.readouterr().out
    assert "+  max_bad_fraction: 0.05" in shown
    assert shown.endswith("slipway upgrade --yes\n")
    assert (folder / "params.yaml").read_bytes() == PARAMS_0.read_bytes()


@pytest.mark.parametrize(("answer", "is_written"), [("y", True), ("n", False)])
def test_upgrade_on_a_terminal_asks_and_obeys_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, is_written: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
    main(["upgrade"])
    same = (folder / "params.yaml").read_bytes() == PARAMS_0.read_bytes()
    assert same is not is_written


def test_upgrade_with_yes_writes_without_asking_and_only_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["upgrade", "--yes"])
    assert load_params().version == 1
    assert capsys.readouterr().out.endswith("slipway check, then slipway run\n")
    main(["upgrade"])
    assert "already has version 1" in capsys.readouterr().out


def test_an_error_ends_upgrade_with_exit_code_1_and_leaves_the_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "params.yaml").write_text("version: 99\n")
    with pytest.raises(SystemExit) as raised:
        main(["upgrade", "--yes"])
    assert raised.value.code == 1
    assert "this Slipway reads version 1 and older" in capsys.readouterr().err
    assert (folder / "params.yaml").read_text() == "version: 99\n"
