"""DVC's commands: a committer if git has no user, and outputs that a check-out lacks."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipway.experiments.repository import check_out, dvc_environment

NAME = "GIT_COMMITTER_NAME"


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new repository, in an account without git's settings."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    return tmp_path


def test_a_run_can_be_saved_if_git_has_no_user_name(folder: Path) -> None:
    assert dvc_environment()[NAME] == "slipway"


def test_commits_keep_the_users_git_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "ada")
    assert dvc_environment()[NAME] == "ada"
    monkeypatch.delenv(NAME)
    for key in ("user.name", "user.email"):
        subprocess.run(["git", "config", key, "ada"], check=True)
    assert NAME not in dvc_environment()


@pytest.mark.process
def test_check_out_names_lost_outputs_even_if_other_stages_never_ran(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(root))

    def dvc(*arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "dvc", *arguments], env=dvc_environment(), check=True)

    dvc("init", "-q")
    made = "stages:\n  made:\n    cmd: echo 1 > made.txt\n    outs: [made.txt]\n"
    (folder / "dvc.yaml").write_text(made)
    dvc("repro", "-q")
    assert check_out() == ""
    later = "  later:\n    cmd: echo 1 > later.txt\n    outs: [later.txt]\n"
    (folder / "dvc.yaml").write_text(made + later)
    (folder / "made.txt").unlink()
    shutil.rmtree(folder / ".dvc/cache")
    assert "made.txt" in check_out()
