"""A folder of a trial has the workspace as it was: edits, untracked code and links to data."""

import subprocess
from pathlib import Path

import pytest

from slipway.search.workspace_copy import FOLDERS, new_folder, take_snapshot
from slipway.system.errors import UnavailableError
from tests.experiments.tiny_project import TinyProject, make_project


@pytest.fixture(name="project")
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyProject:
    project = make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in project.environment().items():
        monkeypatch.setenv(name, value)
    return project


def test_workspace_copy_has_edits_untracked_code_and_links_to_data(project: TinyProject) -> None:
    content = {"data": {"path": "data/own"}}
    # As long as before, and in the same second as the commit.
    edited = (project.path / "train.py").read_text().replace("training with", "TRAINING WITH")
    (project.path / "train.py").write_text(edited)
    (project.path / "evaluate.py").unlink()
    for name in ("mine/network.py", "data/own/1.csv"):
        (project.path / name).parent.mkdir(parents=True, exist_ok=True)
        (project.path / name).write_text(name)
    snapshot = take_snapshot(content, ["dvc.yaml"])
    (project.path / "train.py").write_text("edited later")
    with new_folder(snapshot, "one", "params of the trial", "lock") as folder:
        assert (folder / "train.py").read_text() == edited
        assert not (folder / "evaluate.py").exists()
        assert not (folder / "dvc.yaml").exists()
        assert (folder / "mine/network.py").read_text() == "mine/network.py"
        assert not (folder / "mine").is_symlink()
        assert (folder / "data/own").is_symlink()
        assert (folder / "data/demo/digits.parquet").is_file()
        assert (folder / "params.yaml").read_text() == "params of the trial"
        assert (folder / "dvc.lock").read_text() == "lock"
        assert str(project.path / ".dvc/cache") in (folder / ".dvc/config.local").read_text()
    assert not list(FOLDERS.iterdir())
    assert (project.path / "data/own/1.csv").read_text() == "data/own/1.csv"
    assert len(project.git("worktree", "list").splitlines()) == 1


def test_a_trial_with_the_committed_params_can_be_saved_beside_an_edit(
    project: TinyProject,
) -> None:
    committed = (project.path / "params.yaml").read_text()
    (project.path / "params.yaml").write_text(f"{committed}\n# an edit\n")
    with new_folder(take_snapshot({}, []), "one", committed, None) as folder:
        differs = subprocess.run(["git", "diff", "--cached", "--quiet"], cwd=folder).returncode
        assert not differs, "the index has the edit, which no file has"


def test_removing_a_workspace_copy_ends_the_processes_in_it(project: TinyProject) -> None:
    snapshot = take_snapshot({}, [])
    with new_folder(snapshot, "one", "", None) as folder:
        process = subprocess.Popen(["sleep", "600"], cwd=folder)
    assert process.wait(timeout=10) != 0


@pytest.mark.usefixtures("project")
def test_a_project_without_a_commit_is_refused_with_the_command_that_makes_one() -> None:
    subprocess.run(["git", "update-ref", "-d", "HEAD"], check=True)
    with pytest.raises(UnavailableError, match="git add -A && git commit"):
        take_snapshot({}, [])
