"""The whole pipeline in real processes: 64 pictures, two DeepSpeed ranks, ten stages."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from slipway.artifacts.certificate import read_certificate
from tests.end_to_end.project import NUM_IMAGES, SHAPES, Project
from tests.structure.dangers import artefact_dangers

pytestmark = pytest.mark.process


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def test_clean_quarantines_each_bad_file_under_its_rule(finished: Project) -> None:
    kept = pq.read_table(finished.path / "data/clean/rows.parquet")
    refused = pq.read_table(finished.path / "data/clean/quarantine.parquet").to_pydict()
    assert kept.num_rows == NUM_IMAGES
    rules = dict(
        zip((Path(source).name for source in refused["source"]), refused["rule"], strict=True)
    )
    assert rules.pop("notes.png") == "undecodable"
    assert rules.pop("half.png") == "truncated"
    assert list(rules.values()) == ["exact_duplicate"]


def test_splits_share_no_row_and_each_has_every_class(finished: Project) -> None:
    rows = pq.read_table(finished.path / "data/split/rows.parquet").to_pydict()
    assert len(set(rows["id"])) == NUM_IMAGES
    assert {(split, label) for split, label in zip(rows["split"], rows["label"], strict=True)} == {
        (split, label) for split in ("train", "val", "test") for label in SHAPES
    }


def test_training_used_the_requested_strategy_precision_and_devices(finished: Project) -> None:
    model = read_json(finished.path / "artifacts/model/model.json")
    assert model["actual"]["strategy"] == model["requested"]["strategy"] == "deepspeed_stage_2"
    assert model["actual"]["precision"] == model["requested"]["precision"] == "bf16-mixed"
    assert model["actual"]["world_size"] == 2


def test_each_executed_comparison_in_the_certificate_counts_every_test_row_once(
    finished: Project,
) -> None:
    rows = pq.read_table(finished.path / "data/split/rows.parquet").to_pydict()
    num_test = rows["split"].count("test")
    assert pq.read_table(finished.path / "artifacts/predictions.parquet").num_rows == num_test
    hops = read_certificate(finished.path / "artifacts/certificate.json").hops
    assert {hop.rows for hop in hops if hop.status != "not_executed"} == {num_test}


def test_every_variant_and_live_http_agree_in_the_certificate(finished: Project) -> None:
    certificate = read_certificate(finished.path / "artifacts/certificate.json")
    assert certificate.status == "certified"
    agreeing = {hop.name for hop in certificate.hops if hop.status == "agrees"}
    assert {
        "torch",
        "onnxruntime/cpu/fp32",
        "onnxruntime/cpu/fp16",
        "onnxruntime/cpu/int8",
        "http",
        "grpc",
    } <= agreeing
    unexecuted = [hop for hop in certificate.hops if hop.status == "not_executed"]
    assert all(hop.reason and hop.actual is None for hop in unexecuted)
    exact = [
        hop for hop in certificate.hops if hop.name in {"onnxruntime/cpu/fp32", "http", "grpc"}
    ]
    assert all(hop.flipped == [] for hop in exact)


def test_no_stage_writes_a_pickle(finished: Project) -> None:
    written = [
        finished.path / name
        for name in ("artifacts", "metrics", "reports", "data/clean", "data/split", "data/packed")
    ]
    assert sum(len(list(folder.rglob("*.*"))) for folder in written) > 30
    assert {folder.name: artefact_dangers(folder) for folder in written} == {
        folder.name: {} for folder in written
    }


def test_a_second_dvc_repro_runs_only_the_stage_that_looks_for_changes(finished: Project) -> None:
    assert re.findall(r"Running stage '(\w+)'", finished.shell("dvc repro")) == ["code"]


def test_the_console_of_a_run_says_each_thing_once_and_what_to_do_now(finished: Project) -> None:
    log = (finished.path / ".work" / "repro.log").read_text()
    printed = {
        part.partition("'")[0]: [
            line
            for line in part.partition("> python -m")[2].splitlines()[1:]
            if line and not line.startswith(("Updating lock file", "Use `dvc push`"))
        ]
        for part in log.split("Running stage '")[1:]
    }
    assert len(printed) == 12
    summary = finished.shell("python -m slipway.reports.summary")
    reasons = [
        line for line in (log + summary).splitlines() if "no NVIDIA driver" in line
    ]  # none on a machine with a GPU
    assert len(reasons) <= 1
    assert all("not executed" in line and "tensorrt/fp16" in line for line in reasons)
    assert printed["audit"] == printed["prune"] == []
    assert len(printed["evaluate"]) <= 6
    assert [line for line in printed["clean"] if line.startswith("refused: ")] == [
        "refused: ring/half.png (truncated), ring/notes.png (undecodable), "
        "square/again.png (exact_duplicate)"
    ]
    assert any(line.startswith("onnxruntime/cpu/int8 ") for line in printed["verify"])
    assert "slipway serve" in printed["verify"][-1]
    assert not {line.strip() for line in printed["verify"]} & {
        line.strip() for line in summary.splitlines()
    }
    assert all(words in summary for words in ("accuracy", "f1_macro"))
    assert summary.splitlines()[-6] == "what now"


def test_the_pipeline_writes_nothing_to_the_users_home(finished: Project) -> None:
    written = [path for path in (finished.path / ".work" / "home").rglob("*") if path.is_file()]
    assert written == []


def test_the_pipeline_leaves_no_partial_file(finished: Project) -> None:
    assert [
        path
        for folder in ("data", "artifacts", "reports", "metrics")
        for path in (finished.path / folder).rglob("*.partial")
    ] == []
