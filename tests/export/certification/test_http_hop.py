import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.bundle import LoadedBundle, load_bundle, write_manifest
from slipway.artifacts.certificate import Execution
from slipway.data.sources.samples import Fault, RawSample
from slipway.export.certification.http_hop import (
    RowPayload,
    ServiceClient,
)
from slipway.export.certification.measurement import TestRows
from slipway.system.errors import IntegrityError, ParityError
from tests.calibrations import CALIBRATION, described
from tests.export.certification.payloads import original_payloads, row_payloads
from tests.serving.bundles import LABELS, ONE_COLUMN, write_inert_bundle

ACTUAL = Execution(backend="onnxruntime", provider="cpu", precision="fp16", variant="fp16")
PAYLOADS = [bytes([number]) * 10 for number in range(20)]
Change = Callable[[dict[str, Any]], dict[str, Any]]
Answer = Callable[[bytes, str], dict[str, Any]]


def answer_to(content: bytes, version: str) -> dict[str, Any]:
    """Return probabilities that depend on the bytes, so that a mixed-up row is detected."""
    shares = np.array([1.0 + content[0], 5.0, 9.0])
    shares = (shares / shares.sum()).astype(np.float32)
    probabilities = dict(zip(LABELS, shares.tolist(), strict=True))
    answer = {
        "label": LABELS[int(shares.argmax())],
        "probabilities": probabilities,
        "model_version": version,
        "request_id": "1",
    }
    return described(answer, score=content[0] / 8)


@contextmanager
def service(
    bundle: LoadedBundle,
    change: Change = lambda answer: answer,
    status: int = 200,
    model: Any = None,
    answer: Answer = answer_to,
) -> Iterator[ServiceClient]:
    """Start an HTTP server that responds like the service, and yield a client for it."""
    execution = {
        "requested": {"provider": "auto", "variant": "auto"},
        "actual": ACTUAL.model_dump(),
    }
    card = model if model is not None else {"model_version": bundle.version, "execution": execution}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # the base class's own name
            self._answer(200, card)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            self._answer(status, change(answer(content, bundle.version)))

        def _answer(self, status: int, content: Any) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        with ServiceClient(f"http://127.0.0.1:{server.server_port}", bundle, LABELS) as client:
            yield client
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sample(number: int, payload: bytes, fault: Fault | None = None) -> RawSample:
    return RawSample(str(number), payload, "cat", None, None, fault)


def packed_rows() -> TestRows:
    ids = [hashlib.sha256(payload).hexdigest()[:32] for payload in PAYLOADS]
    images = np.zeros((len(ids), 4, 4, 1), dtype=np.uint8)
    return TestRows(
        "image_classification",
        LABELS,
        ids,
        [str(number) for number in range(len(ids))],
        images,
        np.zeros(len(ids)),
    )


def payloads(order: list[int] | None = None) -> Iterator[RowPayload]:
    return original_payloads(
        (sample(number, PAYLOADS[number]) for number in order or range(len(PAYLOADS))),
        packed_rows(),
    )


def test_http_client_assigns_predictions_to_rows_for_any_order_of_raw_data(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path)
    with service(bundle) as client:
        single, _ = client.measure(
            payloads(order=list(reversed(range(20)))), len(PAYLOADS), timing_rounds=2, actual=ACTUAL
        )
    expected = [list(answer_to(content, "")["probabilities"].values()) for content in PAYLOADS]
    assert single.outputs.tolist() == expected
    assert single.scores is not None
    assert single.scores.tolist() == [content[0] / 8 for content in PAYLOADS]
    assert single.latency_ms > 0
    assert single.rows_per_second > 0


def test_prediction_sets_of_a_pruned_variant_are_checked_by_its_own_calibration(
    tmp_path: Path,
) -> None:
    """Control: a client that has not read `/model` yet uses the calibration of the bundle."""
    plain = write_inert_bundle(tmp_path)
    wide = CALIBRATION.model_copy(
        update={"conformal": CALIBRATION.conformal.model_copy(update={"threshold": 0.0})}
    )
    models = {
        name: model.model_copy(update={"calibration": wide})
        for name, model in plain.manifest.models.items()
    }
    write_manifest(tmp_path, plain.manifest.model_copy(update={"models": models}))

    def answer(content: bytes, version: str) -> dict[str, Any]:
        return described(answer_to(content, version), score=0.5, calibration=wide)

    payload = RowPayload(0, "0", PAYLOADS[0], "image/png")
    with service(load_bundle(tmp_path), answer=answer) as client:
        with pytest.raises(ParityError, match="not in the format"):
            client.predict(payload)
        client.choice()
        assert client.predict(payload)[-1] == 0.5


def test_http_client_reads_requested_and_actual_execution_from_model_info(tmp_path: Path) -> None:
    with service(write_inert_bundle(tmp_path)) as client:
        choice = client.choice()
    assert choice.behind == ACTUAL
    assert choice.requested == Execution(
        backend="http", provider="auto", precision="auto", variant="auto"
    )
    assert choice.actual == ACTUAL.model_copy(update={"backend": "http"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer: answer | {"model_version": "other"}, "answered as model 'other'"),
        (lambda answer: answer | {"label": "cat"}, "not in the format"),
        (lambda answer: answer | {"label": "yak"}, "not in the format"),
        (lambda answer: answer | {"probabilities": {"cat": 1.0}}, "not in the format"),
        (
            lambda answer: answer | {"probabilities": answer["probabilities"] | {"yak": 0.0}},
            "not in the format",
        ),
        (lambda answer: answer | {"probabilities": [1, 0, 0]}, "not in the format"),
        (
            lambda answer: answer | {"prediction_set": answer["prediction_set"][1:]},
            "not in the format",
        ),
        (lambda answer: answer | {"prediction_set": LABELS}, "not in the format"),
        (lambda answer: answer | {"is_ood": not answer["is_ood"]}, "not in the format"),
        (
            lambda answer: {key: value for key, value in answer.items() if key != "ood_score"},
            "not in the format",
        ),
        (lambda answer: [answer], "expected one object"),
        (lambda answer: b"<html>", "expected JSON"),
    ],
)
def test_error_names_the_row_whose_response_is_malformed_or_of_another_model(
    tmp_path: Path, change: Change, message: str
) -> None:
    row = RowPayload(0, "the-row", PAYLOADS[0], "image/png")
    bundle = write_inert_bundle(tmp_path)
    with service(bundle, change) as client, pytest.raises(ParityError, match=message) as caught:
        client.predict(row)
    assert "the-row" in str(caught.value)


def test_error_response_of_the_service_is_reported_with_its_message(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path)
    with (
        service(bundle, lambda _: {"error": "too large"}, status=413) as client,
        pytest.raises(ParityError, match=r"413.*too large"),
    ):
        client.predict(RowPayload(0, "row", PAYLOADS[0], "image/png"))


def test_an_unreachable_service_is_an_error_without_traceback(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path)
    with (
        ServiceClient("http://127.0.0.1:9", bundle, LABELS) as client,
        pytest.raises(ParityError, match="gave no answer"),
    ):
        client.predict(RowPayload(0, "row", PAYLOADS[0], "image/png"))


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (
            {
                "model_version": "other",
                "execution": {"requested": {}, "actual": ACTUAL.model_dump()},
            },
            "model 'other'",
        ),
        ({"model_version": "x"}, "does not say what the service runs"),
        (
            {"model_version": "x", "execution": {"requested": {}, "actual": {"backend": "magic"}}},
            "does not say what the service runs",
        ),
    ],
)
def test_model_info_of_another_form_is_refused(
    tmp_path: Path, card: dict[str, Any], message: str
) -> None:
    with (
        service(write_inert_bundle(tmp_path), model=card) as client,
        pytest.raises(ParityError, match=message),
    ):
        client.choice()


def test_original_bytes_that_changed_since_packing_are_refused() -> None:
    changed = [
        sample(number, PAYLOADS[number] if number != 7 else b"other") for number in range(20)
    ]
    with pytest.raises(IntegrityError, match=r"^7 changed since it was packed"):
        list(original_payloads(changed, packed_rows()))


def test_original_bytes_that_cannot_be_read_are_refused() -> None:
    unreadable = [sample(0, b"", Fault("missing_file", "gone"))]
    with pytest.raises(IntegrityError, match="0 changed"):
        list(original_payloads(unreadable, packed_rows()))


def test_a_test_row_missing_in_the_raw_data_is_refused() -> None:
    present = [sample(number, PAYLOADS[number]) for number in range(20) if number != 7]
    with pytest.raises(
        IntegrityError, match="1 test rows are gone from the raw data, the first is 7"
    ):
        list(original_payloads(present, packed_rows()))


def test_packed_row_at_another_place_in_the_raw_data_is_refused() -> None:
    moved = [sample(0, PAYLOADS[0])._replace(source="elsewhere")]
    with pytest.raises(IntegrityError, match="elsewhere changed"):
        list(original_payloads(moved, packed_rows()))


Raw = tuple[str, str, dict[str, Any]]
ROWS: list[Raw] = [
    (str(number), f"id{number}", {"x": float(number), "name": "Zürich", "gone": None})
    for number in range(150)
]


def answer_to_rows(content: bytes, version: str) -> dict[str, Any]:
    """Predict one row or several like the service, from the number in each row."""
    asked = json.loads(content)

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return answer_to(bytes([int(row["x"])]), version)

    def prediction(row: dict[str, Any]) -> dict[str, Any]:
        return {
            name: answer(row)[name]
            for name in answer(row)
            if name not in ("model_version", "request_id")
        }

    if "rows" in asked:
        return {
            "predictions": [prediction(row) for row in asked["rows"]],
            "model_version": version,
            "request_id": "1",
        }
    return answer(asked)


def table_rows() -> TestRows:
    sources, ids = [source for source, _, _ in ROWS], [row_id for _, row_id, _ in ROWS]
    return TestRows(
        "table_classification",
        LABELS,
        ids,
        sources,
        np.zeros((len(ROWS), 1), dtype=np.float32),
        np.zeros(len(ROWS)),
    )


@pytest.mark.process
def test_table_rows_are_sent_singly_and_in_groups_and_predictions_keep_their_rows(
    tmp_path: Path,
) -> None:
    asked: list[int] = []

    def noting(content: bytes, version: str) -> dict[str, Any]:
        asked.append(len(json.loads(content).get("rows", [])))
        return answer_to_rows(content, version)

    with service(write_inert_bundle(tmp_path, contract=ONE_COLUMN), answer=noting) as client:
        single, grouped = client.measure(
            row_payloads(reversed(ROWS), table_rows()), len(ROWS), timing_rounds=1, actual=ACTUAL
        )
    expected = [
        list(answer_to(bytes([number]), "")["probabilities"].values())
        for number in range(len(ROWS))
    ]
    assert grouped is not None
    assert single.outputs.tolist() == grouped.outputs.tolist() == expected
    assert asked.count(0) == len(ROWS) + 1  # each alone, and one for the latency
    assert sorted(size for size in asked if size) == [
        1,
        1,
        1,
        1,
        2,
        2,
        7,
        7,
        64,
        64,
    ]  # twice 74, then what is left


def test_http_client_sends_one_image_per_request(tmp_path: Path) -> None:
    with service(write_inert_bundle(tmp_path)) as client:
        assert client.measure(payloads(), len(PAYLOADS), timing_rounds=1, actual=ACTUAL)[1] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer: answer | {"predictions": answer["predictions"][1:]}, "gave 2 predictions"),
        (lambda answer: answer | {"predictions": answer["predictions"] * 2}, "gave 6 predictions"),
        (lambda answer: answer | {"predictions": [{"value": 1.0}] * 3}, "not in the format"),
        (lambda answer: {"model_version": answer["model_version"]}, "not in the format"),
        (lambda answer: answer | {"model_version": "other"}, "answered as model 'other'"),
    ],
)
def test_predictions_that_do_not_fit_their_rows_are_refused(
    tmp_path: Path, change: Change, message: str
) -> None:
    some = list(row_payloads(ROWS, table_rows()))[:3]
    bundle = write_inert_bundle(tmp_path, contract=ONE_COLUMN)
    with service(bundle, answer=answer_to_rows) as client:
        assert client.predict_group(some).shape == (
            3,
            len(LABELS) + 1,
        )  # the OOD score is last
    with (
        service(bundle, change, answer=answer_to_rows) as client,
        pytest.raises(ParityError, match=message) as caught,
    ):
        client.predict_group(some)
    assert "3 rows in one request, from row id0" in str(caught.value)


def test_changed_repeated_and_missing_raw_rows_are_refused() -> None:
    cases: list[tuple[list[Raw], str]] = [
        ([("7", "other", {"x": 7.0}), *ROWS], "^7 changed since it was packed"),
        ([ROWS[3], *ROWS], "^3 changed"),
        ([*ROWS, ("151", "id151", {"x": 1.0})], "^151 changed"),
        (ROWS[1:], "1 test rows are gone from the raw data, the first is 0"),
    ]
    for raw, message in cases:
        with pytest.raises(IntegrityError, match=message):
            list(row_payloads(raw, table_rows()))


def test_payload_with_a_number_that_json_cannot_represent_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        list(row_payloads([("0", "id0", {"x": float("nan")})], table_rows()))
