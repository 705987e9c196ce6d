"""The hops of the real service for the raw rows of a CSV file."""

import csv
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution, Hop
from slipway.config.params import Params
from slipway.data.tables.source import read_json_rows
from slipway.export.certification.comparison import HopComparison
from slipway.export.certification.measurement import Measurement, TestRows
from slipway.export.certification.service_hop import ServiceHop
from slipway.export.certification.service_process import serve_command
from slipway.inputs.columns import encode_rows, read_row
from slipway.metrics.scores import Resampling
from tests.export.certification.payloads import row_payloads
from tests.serving.bundles import (
    COLUMNS,
    LABELS,
    ROW,
    certify,
    row_classifier,
    row_probabilities,
    table_row,
    write_bundle,
)

pytestmark = pytest.mark.process
CPU = Execution(backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32")
NUM_ROWS = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write `rows.csv` with umlauts, quotes and missing values, and a certified bundle for it."""
    root = tmp_path_factory.mktemp("table")
    with (root / "rows.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*ROW, "label"])
        writer.writeheader()
        for number in range(NUM_ROWS):
            row = (
                table_row(number)
                | ({"city": 'O\'Hare "<b>"'} if number % 7 == 0 else {})
                | ({"income": ""} if number % 9 == 0 else {})
            )
            writer.writerow(row | {"label": LABELS[number % 3]})
    certify(
        root / "certificate.json", write_bundle(root / "bundle", row_classifier()), status="draft"
    )
    return root


@pytest.fixture(scope="module")
def table_params(folder: Path, export_params: Params) -> Params:
    data = export_params.data.model_copy(
        update={
            "path": str(folder / "rows.csv"),
            "task": "table_classification",
            "target_column": "label",
        }
    )
    return export_params.model_copy(update={"data": data})


def run_hops(
    folder: Path, params: Params, bundle: LoadedBundle, expected: NDArray[np.float32] | None = None
) -> list[Hop]:
    """Run the service's hops against `expected`.

    By default, the graph's predictions for the rows.
    """
    sources = {str(number) for number in range(NUM_ROWS)}
    raw = list(read_json_rows(params.data, COLUMNS.columns, sources))
    inputs = encode_rows([read_row(row, COLUMNS) for _, _, row in raw], COLUMNS)
    outputs = row_probabilities(inputs) if expected is None else expected
    targets = (np.arange(NUM_ROWS) % 3).astype(np.float64)
    rows = TestRows(
        "table_classification",
        LABELS,
        [row_id for _, row_id, _ in raw],
        [source for source, _, _ in raw],
        inputs,
        targets,
    )
    judge = HopComparison(rows, Resampling(seed=1, num_samples=50, confidence=0.95))
    before = Measurement(CPU, outputs, latency_ms=1.0, rows_per_second=1.0)
    reference = judge.first("onnxruntime/cpu/fp32", CPU, before)
    settings = {
        "SLIPWAY_BUNDLE": str(folder / "bundle"),
        "SLIPWAY_CERTIFICATE": str(folder / "certificate.json"),
    }
    service = ServiceHop(
        serve_command(), settings | {"SLIPWAY_ACCEPT_DRAFT": "true"}, folder / "service.log"
    )
    found = service.run(
        judge, bundle, [(reference, before)], lambda: row_payloads(raw, rows), params.verify
    )
    return [hop for hop, _ in found]


def test_service_predicts_raw_rows_as_the_runtime_predicts_encoded_rows(
    folder: Path, table_params: Params
) -> None:
    hops = run_hops(folder, table_params, write_bundle(folder / "bundle", row_classifier()))
    assert [(hop.name, hop.status, hop.reason, hop.rows) for hop in hops] == [
        ("http", "agrees", "", NUM_ROWS),
        ("grpc", "agrees", "", NUM_ROWS),
    ]


def test_http_hop_differs_if_a_row_is_encoded_differently_in_the_service(
    folder: Path, table_params: Params
) -> None:
    bundle = write_bundle(folder / "bundle", row_classifier())
    raw = read_json_rows(
        table_params.data, COLUMNS.columns, {str(number) for number in range(NUM_ROWS)}
    )
    cells = [read_row(row, COLUMNS) for _, _, row in raw]
    cells[40]["age"] = 41.01
    hop, _ = run_hops(folder, table_params, bundle, row_probabilities(encode_rows(cells, COLUMNS)))
    assert hop.status == "differs"
    assert "the largest difference" in hop.reason
