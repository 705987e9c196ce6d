"""The HTTP hop with a fake service process that looks up its predictions."""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution, Hop
from slipway.config.params import Params
from slipway.export.certification.comparison import HopComparison, failed
from slipway.export.certification.http_hop import RowPayload
from slipway.export.certification.measurement import Measurement, TestRows
from slipway.export.certification.service_hop import ServiceHop, not_tried
from slipway.metrics.scores import Resampling
from tests.calibrations import described
from tests.serving.bundles import LABELS, ONE_COLUMN, write_inert_bundle

pytestmark = pytest.mark.process

SERVICE = """
import hashlib, http.server, json, sys
port, book = int(sys.argv[sys.argv.index("--port") + 1]), json.load(open(sys.argv[1]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer(book[self.path])
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.answer(book[hashlib.sha256(body).hexdigest()])
    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
TABLE_SERVICE = SERVICE.replace(
    """self.answer(book[hashlib.sha256(body).hexdigest()])""",
    """request = json.loads(body)
        if "rows" in request:
            answer = {"predictions": [book["together"][row["x"]] for row in request["rows"]]}
        else:
            answer = book["alone"][request["x"]]
        self.answer(answer | {"model_version": book["version"]})""",
)
PAYLOADS = [bytes([number]) for number in range(12)]
FP32 = Execution(backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32")
NO_GRPC = "the service of these tests has no gRPC"
SCORES = np.full(len(PAYLOADS), 0.5, dtype=np.float32)


def outputs() -> NDArray[np.float32]:
    raw = np.random.default_rng(0).random((len(PAYLOADS), len(LABELS)))
    shares: NDArray[np.float32] = (raw / raw.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares


def comparison() -> HopComparison:
    names = [hashlib.sha256(payload).hexdigest()[:32] for payload in PAYLOADS]
    images = np.zeros((len(names), 4, 4, 1), dtype=np.uint8)
    rows = TestRows(
        "image_classification",
        LABELS,
        names,
        names,
        images,
        outputs().argmax(axis=1).astype(np.float64),
    )
    return HopComparison(rows, Resampling(seed=1, num_samples=100, confidence=0.95))


def run_hop(
    tmp_path: Path,
    params: Params,
    answers: NDArray[np.float32],
    behind: Execution = FP32,
    command: list[str] | None = None,
    score: float = 0.5,
) -> Hop:
    bundle = write_inert_bundle(tmp_path / "bundle")
    (tmp_path / "service.py").write_text(SERVICE)
    (tmp_path / "book.json").write_text(json.dumps(make_book(bundle, answers, behind, score)))
    service = ServiceHop(
        command or [sys.executable, str(tmp_path / "service.py"), str(tmp_path / "book.json")],
        {},
        tmp_path / "log",
        NO_GRPC,
    )
    judge, before = (
        comparison(),
        Measurement(FP32, outputs(), latency_ms=1.0, rows_per_second=1.0, scores=SCORES),
    )
    reference = judge.first("onnxruntime/cpu/fp32", FP32, before)
    found = service.run(
        judge, bundle, [(reference, before)], lambda: payloads(judge.rows), params.verify
    )
    assert (found[1][0].name, found[1][0].status) == ("grpc", "not_executed")
    return found[0][0]


def payloads(rows: TestRows) -> Iterator[RowPayload]:
    return (
        RowPayload(position, rows.ids[position], content, "image/png")
        for position, content in enumerate(PAYLOADS)
    )


ROWS = [json.dumps({"x": number}).encode() for number in range(len(PAYLOADS))]


def run_table_hop(
    tmp_path: Path, params: Params, alone: NDArray[np.float32], together: NDArray[np.float32]
) -> Hop:
    """Run the hop with a service that predicts `alone` for single rows, `together` for several."""
    bundle = write_inert_bundle(tmp_path / "bundle", contract=ONE_COLUMN)
    book = make_book(bundle, outputs(), FP32)
    (tmp_path / "service.py").write_text(TABLE_SERVICE)
    answers = {
        "alone": answers_by_row(alone),
        "together": answers_by_row(together),
        "version": bundle.version,
    }
    (tmp_path / "book.json").write_text(json.dumps(book | answers))
    service = ServiceHop(
        [sys.executable, str(tmp_path / "service.py"), str(tmp_path / "book.json")],
        {},
        tmp_path / "log",
        NO_GRPC,
    )
    judge, before = (
        comparison(),
        Measurement(FP32, outputs(), latency_ms=1.0, rows_per_second=1.0, scores=SCORES),
    )
    reference = judge.first("onnxruntime/cpu/fp32", FP32, before)
    payloads = (
        RowPayload(position, judge.rows.ids[position], content, "application/json")
        for position, content in enumerate(ROWS)
    )
    found = service.run(judge, bundle, [(reference, before)], lambda: payloads, params.verify)
    return found[0][0]


def answers_by_row(answers: NDArray[np.float32]) -> list[dict[str, Any]]:
    labelled = (dict(zip(LABELS, row.tolist(), strict=True)) for row in answers)
    return [
        described({"label": max(row, key=lambda name: row[name]), "probabilities": row})
        for row in labelled
    ]


def make_book(
    bundle: LoadedBundle, answers: NDArray[np.float32], behind: Execution, score: float = 0.5
) -> dict[str, Any]:
    execution = {
        "requested": {"provider": "auto", "variant": "auto"},
        "actual": behind.model_dump(),
    }
    book: dict[str, Any] = {
        "/readyz": {},
        "/model": {"model_version": bundle.version, "execution": execution},
    }
    for payload, row in zip(PAYLOADS, answers, strict=True):
        probabilities = dict(zip(LABELS, row.tolist(), strict=True))
        answer = {
            "label": LABELS[int(row.argmax())],
            "probabilities": probabilities,
            "model_version": bundle.version,
        }
        book[hashlib.sha256(payload).hexdigest()] = described(answer, score)
    return book


def test_service_hop_agrees_if_the_service_predicts_as_its_runtime_does(
    tmp_path: Path, export_params: Params
) -> None:
    hop = run_hop(tmp_path, export_params, outputs())
    assert (hop.status, hop.reference, hop.rows, hop.max_difference) == (
        "agrees",
        "onnxruntime/cpu/fp32",
        len(PAYLOADS),
        0.0,
    )
    assert hop.requested.provider == "auto"
    assert hop.actual == FP32.model_copy(update={"backend": "http"})


def test_service_hop_differs_if_the_service_resizes_differently_and_names_the_worst_row(
    tmp_path: Path, export_params: Params
) -> None:
    answers = outputs()
    answers[5] += np.array([1e-3, -1e-3, 0], dtype=np.float32)
    hop = run_hop(tmp_path, export_params, answers)
    assert (hop.name, hop.status, hop.worst_row) == ("http", "differs", comparison().rows.ids[5])


def test_service_hop_differs_if_the_service_returns_other_ood_scores(
    tmp_path: Path, export_params: Params
) -> None:
    hop = run_hop(tmp_path, export_params, outputs(), score=0.5001)
    assert hop.status == "differs"
    assert "the largest difference of an OOD score is 0.0001, expected at most 1e-05" in hop.reason


def test_service_hop_differs_if_the_service_swaps_the_predictions_of_two_callers(
    tmp_path: Path, export_params: Params
) -> None:
    answers = outputs()
    answers[[2, 3]] = answers[[3, 2]]
    assert run_hop(tmp_path, export_params, answers).status == "differs"


def test_service_hop_differs_if_no_hop_certified_the_services_execution(
    tmp_path: Path, export_params: Params
) -> None:
    unproven = FP32.model_copy(update={"provider": "cuda"})
    hop = run_hop(tmp_path, export_params, outputs(), behind=unproven)
    assert hop.status == "differs"
    assert "runs onnxruntime/cuda/fp32, which is not among the executed hops" in hop.reason


def test_service_hop_differs_if_the_service_does_not_start_and_quotes_its_last_output(
    tmp_path: Path, export_params: Params
) -> None:
    hop = run_hop(
        tmp_path,
        export_params,
        outputs(),
        command=[sys.executable, "-c", "raise SystemExit('no model here')"],
    )
    assert hop.status == "differs"
    assert "no model here" in hop.reason


def test_service_hop_agrees_if_single_and_grouped_rows_get_equal_predictions(
    tmp_path: Path, export_params: Params
) -> None:
    hop = run_table_hop(tmp_path, export_params, outputs(), outputs())
    assert (hop.status, hop.rows, hop.max_difference) == ("agrees", len(ROWS), 0.0)


def test_service_hop_reports_rows_swapped_only_in_grouped_requests(
    tmp_path: Path, export_params: Params
) -> None:
    mixed = outputs()
    mixed[[4, 5]] = mixed[[5, 4]]
    hop = run_table_hop(tmp_path, export_params, outputs(), mixed)
    assert hop.status == "differs"
    assert hop.reason.startswith("several rows in one request: the largest difference")


def test_service_hop_differs_if_only_single_requests_get_wrong_predictions(
    tmp_path: Path, export_params: Params
) -> None:
    hop = run_table_hop(tmp_path, export_params, outputs()[::-1], outputs())
    assert (hop.status, hop.reason.startswith("several")) == ("differs", False)


def test_the_http_hop_records_the_larger_difference_of_single_and_grouped_requests(
    tmp_path: Path, export_params: Params
) -> None:
    off = outputs()
    off[3] += np.array([1e-7, -1e-7, 0], dtype=np.float32)
    for number, (alone, together) in enumerate(((off, outputs()), (outputs(), off))):
        hop = run_table_hop(tmp_path / str(number), export_params, alone, together)
        assert hop.status == "agrees"
        assert hop.max_difference is not None
        assert 5e-8 < hop.max_difference < 2e-7


def test_service_is_not_started_if_an_earlier_hop_differs() -> None:
    hops = not_tried(failed("onnxruntime/cpu/fp32", FP32, "wrong"))
    assert [(hop.name, hop.status) for hop in hops] == [
        ("http", "not_executed"),
        ("grpc", "not_executed"),
    ]
    assert all("the earlier hop onnxruntime/cpu/fp32 differs" in hop.reason for hop in hops)
