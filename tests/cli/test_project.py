"""`slipway init`: a project from data, its refusals, and what it prints."""

import re
import subprocess
from pathlib import Path

import pytest

from slipway.cli.command import main
from slipway.config.params import load_params
from tests.cli.test_params import message_of


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, in a repository of its own: the checkout's ignores this folder."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.process
def test_init_writes_a_project_and_says_what_to_type_next(
    folder: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["--target", "cultivar", "--task", "table_classification"]
    main(["init", "my wine", "--data", str(root / "data/demo/wine.csv"), *answers])
    printed = capsys.readouterr().out
    params = load_params(folder / "my wine/params.yaml")
    assert re.search(rf"^  data\.task +{params.data.task}  # ", printed, re.MULTILINE)
    assert "cd 'my wine'\n  slipway run" in printed
    written = {path.name for path in (folder / "my wine").iterdir()} - {".work"}
    assert sorted(written) == [
        *(".dvc", ".dvcignore", ".gitignore", "README.md", "bentofile.yaml", "dvc.yaml"),
        "params.yaml",
    ]
    assert {path.name for path in folder.iterdir()} <= {".git", ".work", "my wine"}


def test_init_asks_for_an_ambiguous_target_with_its_option(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"{n % 7},{n % 5},{n % 3}\n" for n in range(60))
    (folder / "t.csv").write_text(f"a,b,c\n{rows}")
    text = message_of(["init", "p", "--data", "t.csv", "--yes"], capsys)
    assert "--target" in text
    assert not (folder / "p").exists()


def test_error_for_a_wrong_data_path_names_the_searched_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = message_of(["init", "p", "--data", "nowhere"], capsys)
    assert f"'nowhere' does not exist (looked in {folder}). Name a folder" in text


def test_init_refuses_an_existing_project_before_it_reads_data(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "params.yaml").touch()
    text = message_of(["init", "--data", "nowhere"], capsys)
    assert "is a project already" in text
