"""Variables of libraries: set before they are read, and the user's own are kept."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipway.system import environment
from slipway.system.environment import FOLDERS, activation, find_own_commands, prepare_environment


@pytest.fixture(name="project")
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with an environment in `.venv` that holds the command."""
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    scripts = tmp_path / ".venv/bin"
    scripts.mkdir(parents=True)
    for name in ("python", "slipway"):
        (scripts / name).write_text("#!/bin/sh\n")
        (scripts / name).chmod(0o755)
    (scripts / "activate").touch()
    (scripts / "activate.fish").touch()
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setattr(environment, "_PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_caches_and_homes_of_libraries_lie_in_the_project_unless_the_user_chose(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", "/chosen")
    prepare_environment()
    assert os.environ["BENTOML_HOME"] == str(project / ".bentoml")
    assert os.environ["MPLCONFIGDIR"] == "/chosen"
    assert not (project / ".bentoml").exists()  # made when it is used


def test_a_shell_without_the_command_gets_a_hint(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_own_commands()  # for our own children, not for the shell
    assert shutil.which("slipway") == str(project / ".venv/bin/slipway")
    assert activation() == "source .venv/bin/activate"
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert activation() == "source .venv/bin/activate.fish"
    (project / "a folder").mkdir()
    monkeypatch.chdir(project / "a folder")
    assert activation() == f"source {project}/.venv/bin/activate.fish"


def test_a_shell_that_has_the_command_gets_none(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "links").mkdir()
    (project / "links/slipway").symlink_to(project / ".venv/bin/slipway")
    monkeypatch.setattr(environment, "_PATH", f"/usr/bin:{project / 'links'}")
    assert activation() == ""


def test_a_shell_with_another_command_of_this_name_gets_the_hint(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "other").mkdir()
    shutil.copy(project / ".venv/bin/slipway", project / "other")
    monkeypatch.setattr(environment, "_PATH", str(project / "other"))
    assert activation() == "source .venv/bin/activate"


@pytest.mark.process
def test_matplotlib_leaves_a_missing_home_missing(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    outside = {name: value for name, value in os.environ.items() if name not in FOLDERS}
    code = "import slipway.system.command_run, matplotlib; print(matplotlib.get_cachedir())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=outside | {"HOME": str(home), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(tmp_path / ".work/cache/matplotlib")
    assert not home.exists()
