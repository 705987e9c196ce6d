"""The whole pipeline on a table in real processes: from a CSV to a certified service."""

import csv
import json
import re
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.certificate import read_certificate
from slipway.inputs.columns import ColumnContract
from tests import plain_http
from tests.end_to_end.project import Project
from tests.end_to_end.scikit_learn import assert_metrics_as_scikit_learn

pytestmark = pytest.mark.process


def raw_rows(project: Project) -> list[dict[str, float]]:
    """The inputs of every row, as a client would send them."""
    with (project.path / "data/demo/wine.csv").open(newline="") as file:
        return [
            {name: float(cell) for name, cell in row.items() if name != "cultivar"}
            for row in csv.DictReader(file)
        ]


def test_every_executed_hop_agrees_and_http_is_one_of_them(finished_table: Project) -> None:
    certificate = read_certificate(finished_table.path / "artifacts/certificate.json")
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


def test_every_table_row_is_in_exactly_one_split(finished_table: Project) -> None:
    rows = pq.read_table(finished_table.path / "data/split/rows.parquet").to_pydict()
    assert len(set(rows["id"])) == len(raw_rows(finished_table))
    assert set(rows["split"]) == {"train", "val", "test"}


def test_the_metrics_of_a_table_are_those_of_scikit_learn(finished_table: Project) -> None:
    assert assert_metrics_as_scikit_learn(finished_table.path) > 20


def test_clean_writes_the_inferred_columns_to_columns_yaml(finished_table: Project) -> None:
    columns = yaml.safe_load((finished_table.path / "reports/columns.yaml").read_text())
    assert set(columns) == set(raw_rows(finished_table)[0])
    assert {column["kind"] for column in columns.values()} == {"number"}


def test_the_service_gives_the_same_predictions_for_single_and_grouped_rows(
    finished_table: Project, table_service: str
) -> None:
    rows = raw_rows(finished_table)[:3]
    alone = [plain_http.post(f"{table_service}/predict", json=row).json() for row in rows]
    together = plain_http.post(f"{table_service}/predict", json={"rows": rows}).json()
    wrong = plain_http.post(f"{table_service}/predict", json=rows[0] | {"alcohol": "strong"})
    model, page = plain_http.get(f"{table_service}/model"), plain_http.get(table_service)
    assert [answer["label"] for answer in alone] == [
        answer["label"] for answer in together["predictions"]
    ]
    assert alone[0]["probabilities"] == pytest.approx(
        together["predictions"][0]["probabilities"], abs=1e-6
    )
    assert wrong.status_code == 422
    assert wrong.json()["error"]["field"] == "alcohol"
    assert "alcohol" in [
        column["name"] for column in model.json()["input"]["columns"]
    ]  # of which the page makes its form
    assert page.status_code == 200


def test_the_services_contract_was_fitted_on_the_training_rows(finished_table: Project) -> None:
    contract = load_bundle(finished_table.path / "artifacts/bundle").manifest.input
    assert isinstance(contract, ColumnContract)
    splits = pq.read_table(finished_table.path / "data/split/rows.parquet").to_pydict()
    rows = raw_rows(finished_table)
    train = [
        rows[int(source)]["alcohol"]
        for source, split in zip(splits["source"], splits["split"], strict=True)
        if split == "train"
    ]
    assert _column(contract, "alcohol").mean == pytest.approx(sum(train) / len(train), rel=1e-12)
    assert _column(contract, "alcohol").mean != pytest.approx(
        sum(row["alcohol"] for row in rows) / len(rows), rel=1e-9
    )


def test_the_report_pages_of_a_table_exist(finished_table: Project) -> None:
    for name in ("clean.html", "split.html", "evaluate.html", "augment.png", "data.html"):
        assert (finished_table.path / "reports" / name).stat().st_size > 0, name


def test_a_second_dvc_repro_of_a_table_runs_no_stage(finished_table: Project) -> None:
    assert re.findall(r"Running stage '(\w+)'", finished_table.shell("dvc repro")) == ["code"]


def test_evaluate_slices_the_test_rows_by_the_configured_columns(finished_table: Project) -> None:
    content = json.loads((finished_table.path / "metrics/evaluate.json").read_text())
    found = {entry["by"]: 0 for entry in content["slices"]}
    for entry in content["slices"] + content["slices_too_small"]:
        found[entry["by"]] += entry["rows"]
    assert found == dict.fromkeys(("class", "alcohol", "hue"), content["rows"])


@pytest.mark.nightly(seconds=15)
def test_a_reference_bundle_is_compared_with_itself_on_unseen_rows(
    finished_table: Project,
) -> None:
    """Compares on raw rows. Must be the last test of this project, because it changes params."""
    assert "released" in finished_table.shell("slipway release")
    finished_table.set_params(
        {"evaluate": {"reference_model": "artifacts/reference_model", "max_regression": 0.0}}
    )
    printed = finished_table.shell("dvc repro evaluate")
    content = json.loads((finished_table.path / "metrics/evaluate.json").read_text())
    (reference,) = content["reference_model"]
    assert (reference["difference"]["difference"], reference["p_value"]) == (0, 1)
    assert (reference["known"], reference["refused"], reference["difference"]["rows"]) == (
        0,
        0,
        content["rows"],
    )
    assert f"against reference model {reference['version']}" in printed


def _column(contract: ColumnContract, name: str) -> Any:
    return next(column for column in contract.columns if column.name == name)
