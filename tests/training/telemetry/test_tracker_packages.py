"""Trackers whose packages are not installed are refused."""

import sys
from pathlib import Path

import pytest

from slipway.system.errors import UnavailableError
from slipway.training.telemetry.tracker_packages import check_trackers
from tests.project_params import PROJECT

BOTH = PROJECT.train.model_copy(update={"loggers": ["mlflow", "wandb"]})


def test_installed_experiment_trackers_are_accepted() -> None:
    check_trackers(BOTH)


def test_a_missing_tracker_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UnavailableError) as refused:
        check_trackers(BOTH)
    text = str(refused.value)
    assert "but wandb cannot be imported here" in text
    assert "expected the packages of the extra `loggers`" in text
    assert "pip install 'slipway-ml[loggers]'" in text


def test_a_folder_with_the_name_of_a_tracker_is_not_taken_for_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UnavailableError, match="wandb cannot be imported"):
        check_trackers(PROJECT.train.model_copy(update={"loggers": ["wandb"]}))
