"""`make install` builds an environment only if the present one lacks the locked packages."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(name="project")
def _project(root: Path, tmp_path: Path) -> Path:
    """A project with the two scripts, a lock and a built environment of one command."""
    folder = tmp_path / "project"
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("install.sh", "env.sh"):
        shutil.copy(root / name, folder)
    (folder / "requirements.lock").write_text("numpy==2.4.6\n")
    (commands / "python").symlink_to(sys.executable)
    (commands / "greet").write_text(f"#!{commands}/python\nprint('hello')\n")
    (commands / "greet").chmod(0o755)
    (folder / ".venv" / ".complete").write_text(f"{folder}/.venv\nnumpy==2.4.6\n")
    return folder


def install(project: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "install.sh", python, "demo"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )


def old_python(folder: Path) -> str:
    """An interpreter that says it is Python 3.9 and can do nothing else."""
    path = folder / "python3.9"
    path.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    path.chmod(0o755)
    return str(path)


def test_an_environment_with_the_locked_packages_is_taken_as_it_is(project: Path) -> None:
    done = install(project)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_linked_environment_with_the_locked_packages_is_taken_in_a_fresh_clone(
    project: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copy(project / "install.sh", clone)
    (clone / "requirements.lock").write_text("numpy==2.4.6\n")  # newer than the environment
    (clone / ".venv").symlink_to(project / ".venv")
    done = install(clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_linked_environment_with_other_packages_is_refused_with_the_way_out(
    project: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    (project / ".venv").rename(shared)
    (project / ".venv").symlink_to(shared)
    (project / "requirements.lock").write_text("numpy==2.5.5\n")
    done = install(project)
    assert done.returncode == 1
    for part in (
        f"a link to {shared}",
        "does not hold the packages of requirements.lock",
        "remove the link",
    ):
        assert part in done.stderr


def test_the_commands_of_a_moved_project_are_mended(project: Path, tmp_path: Path) -> None:
    moved = project.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError):
        subprocess.run([moved / ".venv/bin/greet"], check=True)
    assert "this project was moved" in install(moved).stdout
    assert subprocess.check_output([moved / ".venv/bin/greet"], text=True) == "hello\n"
    assert install(moved).stdout == ""


def test_env_sh_says_how_to_mend_a_moved_project(project: Path, tmp_path: Path) -> None:
    def warning(folder: Path) -> str:
        line = ["env", "-u", "MAKELEVEL", "bash", "-c", "source env.sh"]
        return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=True).stderr

    assert warning(project) == ""
    assert "was moved from" in warning(project.rename(tmp_path / "moved"))


def test_an_unsupported_python_is_refused_before_anything_is_built(
    project: Path, tmp_path: Path
) -> None:
    (project / "requirements.lock").write_text("numpy==2.5.5\n")
    done = install(project, old_python(tmp_path))
    assert done.returncode == 1
    assert (
        "Python 3.9.2 found, expected Python 3.11 to 3.14. Name one: make PYTHON=python3.12 demo"
        in done.stderr
    )
    assert (project / ".venv" / "bin" / "greet").exists()
