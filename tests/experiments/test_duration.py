"""The prediction of how long a run takes, from the times of earlier runs."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slipway.config.params import read_content, resolved
from slipway.config.seals import stage_entry, stage_params
from slipway.config.stage_graph import Pipeline
from slipway.experiments.duration import predicted, recorded_seconds, stages_that_run
from slipway.experiments.records import ExperimentRecord, params_of
from slipway.kinds.code_digest import stage_files
from tests.conftest import ROOT
from tests.experiments.records import record

CONTENT = {"seed": 7, "train": {"epochs": 30, "network": "small_resnet", "learning_rate": 0.1}}
SECONDS = {"clean": 2.0, "train": 68.0, "export": 40.0, "verify": 20.0}


def run(seconds: Mapping[str, float] = SECONDS, **train: Any) -> ExperimentRecord:
    params = params_of({**CONTENT, "train": CONTENT["train"] | train})  # type: ignore[operator]
    return record("run-1", params=params, stage_seconds=seconds)


def test_the_line_names_the_total_and_the_longest_stages_that_will_run() -> None:
    assert predicted(CONTENT, list(SECONDS), [run()]) == (
        "takes about 2 min, as in earlier runs: train 68 s, export 40 s, verify 20 s"
    )
    assert predicted(CONTENT, ["export", "verify"], [run()]) == (
        "takes about 60 s, as in earlier runs: export 40 s, verify 20 s"
    )


def test_a_first_run_says_that_its_time_is_not_known_and_a_short_one_says_nothing() -> None:
    assert predicted(CONTENT, ["clean", "train"], []).startswith("how long it takes is known after")
    assert predicted(CONTENT, ["clean"], []) == ""
    assert predicted(CONTENT, ["clean"], [run()]) == ""
    assert predicted(CONTENT, [], [run()]) == ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 68.0),
        ({"epochs": 15}, 128.0),
        ({"learning_rate": 0.2}, 68.0),
        ({"network": "mlp"}, None),
        ({"freeze_epochs": 30}, None),
    ],
)
def test_a_training_takes_as_long_as_its_epochs_in_a_run_of_the_same_network(
    changes: dict[str, Any], expected: float | None
) -> None:
    assert recorded_seconds("train", params_of(CONTENT), [run(**changes)]) == expected


def test_the_newest_run_that_is_alike_and_ran_the_stage_counts() -> None:
    records = [run({"clean": 1.0}), run(network="mlp"), run({"train": 50.0}), run()]
    assert recorded_seconds("train", params_of(CONTENT), records) == 50.0
    text = predicted(CONTENT, ["train", "export", "audit"], records)
    assert text.endswith("train 50 s, export 40 s; not known yet: audit")


def test_changed_raw_data_run_their_stage_and_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slipway").symlink_to(ROOT / "slipway")
    pipeline = Pipeline(
        params={name: ["seed"] for name in ("clean", "split", "train")},
        deps={"clean": ["rows.csv"], "split": ["cleaned"], "train": ["other.csv"]},
        outs={"code": ["code.yaml"], "clean": ["cleaned"], "split": ["parts"], "train": ["model"]},
        metrics={},
    )
    for name in ("rows.csv", "other.csv", "cleaned", "parts", "model"):
        (tmp_path / name).touch()
    content = read_content(ROOT / "params.yaml")
    entries = {
        stage: stage_entry(
            stage_files(Path(), stage), stage_params(resolved(content), pipeline, stage)
        )
        for stage in ("clean", "split", "train")
    }
    assert stages_that_run(content, pipeline, None) == list(entries), "nothing was run yet"
    lock = {stage: {"params": {"code.yaml": {stage: entry}}} for stage, entry in entries.items()}
    (tmp_path / "dvc.lock").write_text(json.dumps({"stages": lock}))
    assert stages_that_run(content, pipeline, None) == []
    later = (tmp_path / "dvc.lock").stat().st_mtime + 1
    os.utime("rows.csv", (later, later))
    assert stages_that_run(content, pipeline, None) == ["clean", "split"]
    assert stages_that_run(content, pipeline, "clean") == ["clean"]
    os.utime("rows.csv", (1, 1))
    (tmp_path / "model").unlink()
    assert stages_that_run(content, pipeline, None) == ["train"]
    assert stages_that_run({**content, "seed": 8}, pipeline, None) == list(entries)
