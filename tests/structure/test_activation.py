"""The environment that `make install` built, as shells activate it; each copy runs its own code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.process
SHOW = "echo $VIRTUAL_ENV; echo $BENTOML_HOME; slipway --version"
SYSTEM = "/usr/bin:/bin"


@pytest.fixture(name="copy")
def _copy(tmp_path: Path) -> Path:
    """A copy of the code that calls itself `copy`, with a link to the environment of the tests."""
    folder = tmp_path / "a copy"
    shutil.copytree(ROOT / "slipway", folder / "slipway")
    project = (ROOT / "pyproject.toml").read_text().replace('\nversion = "', '\nversion = "copy ')
    (folder / "pyproject.toml").write_text(project)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def shell(line: str, folder: Path, program: str = "bash", **variables: str) -> list[str]:
    done = subprocess.run(
        [program, "-c", line],
        cwd=folder,
        env={"PATH": SYSTEM, "HOME": str(folder / "nowhere")} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("program", ["bash", "sh", "zsh", "fish"])
def test_activation_gives_the_commands_and_the_code_of_a_copy(copy: Path, program: str) -> None:
    if shutil.which(program, path=SYSTEM) is None:
        pytest.skip(f"{program} is not installed")
    script = ".venv/bin/activate.fish" if program == "fish" else ".venv/bin/activate"
    prefix, home, version = shell(f". {script}; {SHOW}", copy, program)
    assert (prefix, home) == (str(copy / ".venv"), str(copy / ".bentoml"))
    assert version.startswith("slipway copy ")
    left = (
        f'. {script}; deactivate; echo "left:$BENTOML_HOME$VIRTUAL_ENV"; command -v slipway || true'
    )
    assert shell(left, copy, program) == ["left:"]


def test_a_project_elsewhere_runs_the_code_of_the_copy_that_is_active(
    copy: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    show = "python -c 'import slipway; print(slipway.__file__)'; bentoml --version; dvc --version"
    file, *versions = shell(f"source '{copy}/.venv/bin/activate'; {show}", project)
    assert file == str(copy / "slipway/__init__.py")
    assert len(versions) == 2


def test_the_command_of_a_copy_runs_its_code_without_activation(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/slipway").symlink_to(Path(sys.prefix) / "bin/slipway")
    (own,) = shell("'a copy/.venv/bin/slipway' --version", tmp_path)
    assert own.startswith("slipway copy ")
    (linked,) = shell("bin/slipway --version", tmp_path)  # a link to the command follows it
    assert "copy" not in linked


def test_a_folder_without_code_runs_the_code_that_was_installed(tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    assert shell("source .venv/bin/activate; slipway --version", tmp_path)


def test_activation_keeps_a_home_of_bentoml_that_the_user_chose(copy: Path) -> None:
    line = f"source .venv/bin/activate; {SHOW}; deactivate; echo $BENTOML_HOME"
    _, chosen, _, afterwards = shell(line, copy, BENTOML_HOME="/chosen")
    assert chosen == afterwards == "/chosen"


def test_a_second_activation_takes_the_home_of_its_own_clone(copy: Path) -> None:
    first = f"source '{ROOT}/.venv/bin/activate'"
    _, home, version = shell(f"{first}; source .venv/bin/activate; {SHOW}", copy)
    assert home == str(copy / ".bentoml")
    assert version.startswith("slipway copy ")


def test_a_plain_sh_in_another_folder_says_where_it_activates(copy: Path) -> None:
    if os.path.realpath("/bin/sh").endswith("bash"):
        pytest.skip("sh is bash here, which knows the path of what it reads")
    done = subprocess.run(
        ["sh", "-c", f". '{copy}/.venv/bin/activate' || exit 3; exit 0"],
        cwd=copy.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert f"expected it in {copy.parent}" in done.stderr
