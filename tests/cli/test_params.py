"""`slipway set` and `slipway check` in the folder of a project, and outside of one."""

import shutil
from pathlib import Path

import pytest

from slipway.cli.command import main
from slipway.config.params import load_params


def message_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The error of a command that ends with exit code 1."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 1
    return capsys.readouterr().err


@pytest.fixture(name="folder")
def _folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with params.yaml."""
    shutil.copy(root / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_set_changes_several_values_and_prints_the_difference(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["set", "train.epochs=3", "evaluate.gates.accuracy.min=0.5"])
    params = load_params()
    assert (params.train.epochs, params.evaluate.gates["accuracy"].min) == (3, 0.5)
    assert "+  epochs: 3" in capsys.readouterr().out


def test_set_leaves_the_file_as_it_is_if_one_of_the_values_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "params.yaml").read_bytes()
    text = message_of(["set", "train.epochs=3", "train.batch_size=none"], capsys)
    assert "train.batch_size: found 'none', expected a whole number" in text
    assert (folder / "params.yaml").read_bytes() == before


@pytest.mark.parametrize("arguments", [["set", "train.epochs=3"], ["check"]])
def test_error_outside_a_project_names_slipway_init(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = message_of(arguments, capsys)
    assert f"params.yaml is missing in {tmp_path}, expected in the folder of a project" in text
    assert "slipway init" in text
