"""Faults planted in a copy of the service's code or in its contract: the HTTP hop must differ.

The runtime behind it is correct, so the fault is between the raw bytes and the network's input.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution, Hop, first_fault
from slipway.config.params import Params
from slipway.export.certification.comparison import HopComparison
from slipway.export.certification.http_hop import RowPayload
from slipway.export.certification.measurement import Measurement, TestRows
from slipway.export.certification.service_hop import ServiceHop
from slipway.export.certification.service_process import serve_command
from slipway.export.certification.verdict import make_certificate, raise_if_refused
from slipway.inputs.columns import ColumnContract, encode_rows, read_row
from slipway.inputs.images import array_from_bytes
from slipway.kinds.registry import Task
from slipway.metrics.scores import Resampling
from slipway.system.errors import ParityError
from tests.conftest import ROOT
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    LABELS,
    certify,
    picture,
    probabilities,
    row_classifier,
    row_probabilities,
    table_row,
    write_bundle,
)
from tests.serving.server import copy_service

pytestmark = pytest.mark.process
CPU = Execution(backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32")
PICTURES = [
    picture(number, size=(20, 14)) for number in range(24)
]  # larger than the network's, so that they are resized
ROWS = [table_row(number) | ({"income": None} if number % 4 == 0 else {}) for number in range(24)]


def run_hops(folder: Path, bundle: LoadedBundle, params: Params, code: Path = ROOT) -> list[Hop]:
    """Run the hops of the runtime and of the service with the code in `code`, on the test rows."""
    certify(folder / "certificate.json", bundle, status="draft")
    is_table = isinstance(bundle.manifest.input, ColumnContract)
    rows, outputs = _table_rows() if is_table else _image_rows()
    judge, before = (
        HopComparison(rows, Resampling(1, 50, 0.95)),
        Measurement(CPU, outputs, latency_ms=1.0, rows_per_second=1.0),
    )
    reference = judge.first("onnxruntime/cpu/fp32", CPU, before)
    settings = {
        "SLIPWAY_BUNDLE": str(folder / "bundle"),
        "SLIPWAY_CERTIFICATE": str(folder / "certificate.json"),
    }
    command = ["env", f"--chdir={code}", *serve_command()]
    service = ServiceHop(
        command, settings | {"SLIPWAY_ACCEPT_DRAFT": "true"}, folder / "service.log"
    )
    hops = service.run(
        judge, bundle, [(reference, before)], lambda: _payloads(rows, is_table), params.verify
    )
    return [reference, *(hop for hop, _ in hops)]


def _image_rows() -> tuple[TestRows, NDArray[np.float32]]:
    inputs = np.stack([array_from_bytes(payload, CONTRACT) for payload in PICTURES])
    return _rows("image_classification", inputs), probabilities(inputs)


def _table_rows() -> tuple[TestRows, NDArray[np.float32]]:
    inputs = encode_rows([read_row(row, COLUMNS) for row in ROWS], COLUMNS)
    return _rows("table_classification", inputs), row_probabilities(inputs)


def _rows(task: Task, inputs: NDArray[Any]) -> TestRows:
    names = [f"row{number}" for number in range(len(inputs))]
    return TestRows(
        task, LABELS, names, names, inputs, (np.arange(len(inputs)) % 3).astype(np.float64)
    )


def _payloads(rows: TestRows, is_table: bool) -> Iterator[RowPayload]:
    contents = [json.dumps(row).encode() for row in ROWS] if is_table else PICTURES
    kind = "application/json" if is_table else "application/octet-stream"
    return (
        RowPayload(place, rows.ids[place], content, kind) for place, content in enumerate(contents)
    )


def copy_of_the_service(folder: Path, name: str, written: str, planted: str) -> Path:
    """Copy the service's code with one change; everything else is the project's own."""
    path = copy_service(folder) / name
    text = path.read_text()
    assert text.count(written) == 1
    path.write_text(text.replace(written, planted))
    return folder


def assert_guilty(name: str, hops: list[Hop], bundle: LoadedBundle) -> None:
    fault = first_fault(hops)
    assert fault is not None
    assert fault.name == name
    assert fault.reference == "onnxruntime/cpu/fp32"
    with pytest.raises(
        ParityError, match=rf"hop {name} differs from onnxruntime/cpu/fp32: .*Worst row: row\d+\."
    ):
        raise_if_refused(
            make_certificate(bundle, hops, {}, [], draft=False), Path("certificate.json")
        )


def test_hop_of_an_unchanged_copy_of_the_service_agrees(
    tmp_path: Path, export_params: Params
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    code = copy_of_the_service(
        tmp_path / "code",
        "requests/decoding.py",
        "self._contract = contract",
        "self._contract = contract  # as it was",
    )
    assert [hop.status for hop in run_hops(tmp_path, bundle, export_params, code)] == [
        "agrees",
        "agrees",
        "agrees",
    ]


def test_grpc_hop_differs_if_the_service_converts_tensors_wrongly(
    tmp_path: Path, export_params: Params
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    code = copy_of_the_service(
        tmp_path / "code",
        "open_inference/conversion.py",
        'answer["probabilities"][label] for',
        '0.999 * answer["probabilities"][label] for',
    )
    hops = run_hops(tmp_path, bundle, export_params, code)
    assert [hop.status for hop in hops] == ["agrees", "agrees", "differs"]
    assert_guilty("grpc", hops, bundle)


@pytest.mark.parametrize(
    ("written", "planted"),
    [
        (
            "return array_from_bytes(image, self._contract)",
            "return array_from_bytes(image, self._contract)[..., ::-1]",
        ),
        pytest.param(
            "self._contract = contract",
            'self._contract = contract.model_copy(update={"interpolation": "nearest"})',
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["swapped channels", "another filter"],
)
def test_http_hop_differs_if_the_service_decodes_images_wrongly(
    tmp_path: Path, export_params: Params, written: str, planted: str
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    code = copy_of_the_service(tmp_path / "code", "requests/decoding.py", written, planted)
    hops = run_hops(tmp_path, bundle, export_params, code)
    assert_guilty("http", hops, bundle)
    assert (hops[2].name, hops[2].status) == ("grpc", "not_executed")


@pytest.mark.parametrize(
    ("column", "change"),
    [
        pytest.param("colour", {"categories": ["green", "red", "blue"]}, marks=pytest.mark.nightly),
        ("age", {"std": 12.6}),
        pytest.param("income", {"fill": 3.1e4}, marks=pytest.mark.nightly),
    ],
    ids=["wrong category code", "wrong scaling", "wrong imputation"],
)
def test_http_hop_differs_if_the_service_encodes_columns_wrongly(
    tmp_path: Path, export_params: Params, column: str, change: dict[str, Any]
) -> None:
    columns = [
        entry.model_copy(update=change if entry.name == column else {}) for entry in COLUMNS.columns
    ]
    wrong = ColumnContract(kind="columns", columns=columns)
    bundle = write_bundle(tmp_path / "bundle", row_classifier(), input=wrong)
    assert_guilty("http", run_hops(tmp_path, bundle, export_params), bundle)
