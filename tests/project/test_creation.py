"""New project folders: their files, git and DVC, and files that are never overwritten."""

import csv
import dataclasses
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from dvc.utils.serialize import parse_yaml

from slipway.config.params import load_params
from slipway.project.creation import create, params_file
from slipway.project.inspection import inspect
from slipway.project.proposal import ProjectProposal, propose
from slipway.system.errors import ParamsError
from tests.project.shapes import wine, wine_parquet


@pytest.fixture
def proposal(tmp_path: Path) -> ProjectProposal:
    return propose(inspect(wine_parquet(tmp_path)))


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.process
def test_a_project_is_complete_and_committed_even_if_git_has_no_user_name(
    proposal: ProjectProposal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "EMAIL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("GIT_COMMITTER_EMAIL", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "project"
    create(folder, proposal)
    params = load_params(folder / "params.yaml")
    assert params.data.path == str(tmp_path / "wine.parquet")
    assert git(folder, "status", "--porcelain") == ""
    tracked = git(folder, "ls-files").split()
    assert {"params.yaml", "dvc.yaml", ".gitignore", ".dvcignore", ".dvc/config"} <= set(tracked)
    assert "slipway init" in git(folder, "log", "-1", "--format=%an")
    assert (folder / ".dvcignore").read_text().startswith("/.venv")


@pytest.mark.process
def test_bento_of_a_new_project_has_the_folders_name_and_the_clones_image(
    proposal: ProjectProposal, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    create(tmp_path / "2 Wines, Δ!", proposal)
    bentofile = yaml.safe_load((tmp_path / "2 Wines, Δ!/bentofile.yaml").read_text())
    clone = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["bentoml"]["build"]
    assert bentofile["name"] == "2_wines"
    assert bentofile["docker"]["env"] == clone["docker"]["env"]
    assert bentofile["service"] == clone["service"]


@pytest.mark.process
def test_new_project_inside_a_git_repository_commits_no_files_of_the_user(
    proposal: ProjectProposal, tmp_path: Path
) -> None:
    git(tmp_path, "init", "-q")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    git(tmp_path, *identity, "commit", "-q", "--allow-empty", "-m", "mine")
    create(tmp_path / "model", proposal)
    assert git(tmp_path, "log", "--format=%s").split() == ["mine"]
    assert (tmp_path / "model/.dvc/config").is_file()


@pytest.mark.unit
@pytest.mark.parametrize("name", ["params.yaml", "dvc.yaml"])
def test_an_existing_project_is_never_overwritten(
    proposal: ProjectProposal, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ParamsError, match="is a project already"):
        create(tmp_path, proposal)
    assert (tmp_path / name).read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "wine.parquet"])


@pytest.mark.unit
def test_create_refuses_a_proposal_with_an_open_question_and_lists_its_candidates(
    tmp_path: Path,
) -> None:
    with pytest.raises(ParamsError, match=r"--target.*cultivar"):
        create(tmp_path / "project", propose(inspect(wine(tmp_path))))
    assert not (tmp_path / "project").exists()


@pytest.mark.unit
@pytest.mark.parametrize("name", ["p {1}", "p{", "}"])
def test_a_folder_with_braces_in_its_path_is_refused_before_anything_is_written(
    proposal: ProjectProposal, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ParamsError, match="has braces, which DVC cannot handle"):
        create(tmp_path / name / "x", proposal)
    assert not (tmp_path / name).exists()


@pytest.mark.unit
def test_every_word_that_yaml_reads_as_something_else_stays_a_class_and_a_column(
    tmp_path: Path,
) -> None:
    names = ["no", "on", "1e3", "0x1F", "0o17", "D\nE", "a # b", "\u200bA"]
    rows = [(number, f"{number / 7:.3f}", names[number % 8]) for number in range(400)]
    with (tmp_path / "data.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("x: y", "1e5", "yes"), *rows])
    found = propose(inspect(tmp_path / "data.csv"), target="yes")
    assert len(found.params["data"].get("classes", names)) == len(names)
    text = params_file(tmp_path / "project", found)
    assert parse_yaml(text, "params.yaml")["data"] == found.params["data"]
    # The same names as allowed classes, as spellings of another and in every comment.
    data = {**found.params["data"], "classes": names, "label_map": {"nein": "no", "D E": "D\nE"}}
    reasons = dict.fromkeys(found.reasons, " ".join(names)) | {"data.classes": "classes: D\nE"}
    changed = dataclasses.replace(found, params={**found.params, "data": data}, reasons=reasons)
    text = params_file(tmp_path / "project", changed)
    assert parse_yaml(text, "params.yaml")["data"] == data


@pytest.mark.unit
def test_nothing_is_written_if_the_params_would_not_be_read_as_proposed(
    proposal: ProjectProposal, tmp_path: Path
) -> None:
    data = {**proposal.params["data"], "classes": ("A", "B")}  # which YAML reads as a list
    proposal = dataclasses.replace(proposal, params={**proposal.params, "data": data})
    with pytest.raises(ParamsError, match="would not be read as it was proposed: data differ"):
        create(tmp_path / "project", proposal)
    assert not (tmp_path / "project").exists()
