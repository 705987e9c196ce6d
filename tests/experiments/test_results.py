"""The devices of a run, read from the metrics of its training."""

import json
from pathlib import Path

import pytest

from slipway.artifacts.locations import TRAINED
from slipway.experiments.results import _devices

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"processes": 2, "gpus": 0}, {"processes": 2, "gpus": 0}),
        ({"processes": 2, "gpus": 2}, {"processes": 2, "gpus": 2}),
        ({"processes": 2}, {"processes": 2, "gpus": None}),
        ({}, {"processes": None, "gpus": None}),
    ],
)
def test_a_training_has_the_processes_and_gpus_that_its_metrics_record(
    tmp_path: Path, metrics: dict[str, int], expected: dict[str, int | None]
) -> None:
    path = tmp_path / TRAINED
    path.parent.mkdir()
    path.write_text(json.dumps(metrics))
    assert _devices(tmp_path) == expected


def test_a_run_without_metrics_of_a_training_has_unknown_devices(tmp_path: Path) -> None:
    assert _devices(tmp_path) == {"processes": None, "gpus": None}
