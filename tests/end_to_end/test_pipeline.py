"""The whole way with real processes: 64 pictures, two DeepSpeed ranks, ten stages, one certificate."""

import json
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


def test_every_file_is_kept_or_quarantined_with_its_rule(finished: Project) -> None:
    kept = pq.read_table(finished.path / "data/clean/rows.parquet")
    refused = pq.read_table(finished.path / "data/clean/quarantine.parquet").to_pydict()
    assert kept.num_rows == NUM_IMAGES
    rules = dict(
        zip((Path(source).name for source in refused["source"]), refused["rule"], strict=True)
    )
    assert rules.pop("notes.png") == "undecodable"
    assert rules.pop("half.png") == "truncated"
    assert list(rules.values()) == ["exact_duplicate"]


def test_the_splits_share_no_row_and_every_class_is_in_each(finished: Project) -> None:
    rows = pq.read_table(finished.path / "data/split/rows.parquet").to_pydict()
    assert len(set(rows["id"])) == NUM_IMAGES
    assert {(split, label) for split, label in zip(rows["split"], rows["label"], strict=True)} == {
        (split, label) for split in ("train", "val", "test") for label in SHAPES
    }


def test_what_was_asked_for_is_what_trained(finished: Project) -> None:
    model = read_json(finished.path / "artifacts/model/model.json")
    assert model["actual"]["strategy"] == model["requested"]["strategy"] == "deepspeed_stage_2"
    assert model["actual"]["precision"] == model["requested"]["precision"] == "bf16-mixed"
    assert model["actual"]["world_size"] == 2


def test_every_test_row_is_counted_once_at_every_hop(finished: Project) -> None:
    rows = pq.read_table(finished.path / "data/split/rows.parquet").to_pydict()
    num_test = rows["split"].count("test")
    assert pq.read_table(finished.path / "artifacts/predictions.parquet").num_rows == num_test
    hops = read_certificate(finished.path / "artifacts/certificate.json").hops
    assert {hop.rows for hop in hops if hop.status != "not_executed"} == {num_test}


def test_the_certificate_covers_every_variant_and_live_http(finished: Project) -> None:
    certificate = read_certificate(finished.path / "artifacts/certificate.json")
    assert certificate.status == "certified"
    agreeing = {hop.name for hop in certificate.hops if hop.status == "agrees"}
    assert {
        "torch",
        "onnxruntime/cpu/fp32",
        "onnxruntime/cpu/fp16",
        "onnxruntime/cpu/int8",
        "http",
    } <= agreeing
    unexecuted = [hop for hop in certificate.hops if hop.status == "not_executed"]
    assert all(hop.reason and hop.actual is None for hop in unexecuted)
    exact = [hop for hop in certificate.hops if hop.name in {"onnxruntime/cpu/fp32", "http"}]
    assert all(hop.flipped == [] for hop in exact)


def test_no_file_that_a_stage_wrote_is_a_pickle(finished: Project) -> None:
    written = [
        finished.path / name
        for name in ("artifacts", "metrics", "reports", "data/clean", "data/split", "data/packed")
    ]
    assert sum(len(list(folder.rglob("*.*"))) for folder in written) > 30
    assert {folder.name: artefact_dangers(folder) for folder in written} == {
        folder.name: {} for folder in written
    }


def test_a_second_repro_does_nothing(finished: Project) -> None:
    assert "Data and pipelines are up to date." in finished.shell("dvc repro")


def test_the_summary_prints_one_table(finished: Project) -> None:
    text = finished.shell("python -m slipway.reports.summary")
    for expected in ("accuracy", "f1_macro", "fp16", "int8", "not executed", "make serve"):
        assert expected in text, text


def test_nothing_was_written_to_the_users_home(finished: Project) -> None:
    written = [path for path in (finished.path / ".work" / "home").rglob("*") if path.is_file()]
    assert written == []


def test_no_partial_file_is_left(finished: Project) -> None:
    assert [
        path
        for folder in ("data", "artifacts", "reports", "metrics")
        for path in (finished.path / folder).rglob("*.partial")
    ] == []
