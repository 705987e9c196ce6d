"""The last hop: the original images, or the raw rows of a table, to the running service over HTTP, as any client would send them.

A table's rows go out twice: each in a request of its own, and several in one. Refused: data that is not what the packed
rows were made from, an answer of another model version, an answer that is not of the declared form.
"""

import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution
from slipway.artifacts.input_contract import InputContract
from slipway.config.sections import DataParams
from slipway.data.sources.samples import RawSample
from slipway.data.sources.sources import read_samples
from slipway.data.tables.source import read_json_rows
from slipway.export.certification.comparison import Measurement, TestRows
from slipway.inputs.columns import ColumnContract
from slipway.system import files
from slipway.system.errors import IntegrityError, ParityError

_CONNECTIONS = 8
_CHUNK_ROWS = 256  # payloads held in memory at a time
_ID_DIGITS = 32  # a row's id is the beginning of its SHA-256
_ROWS_IN_A_REQUEST = (
    1,
    2,
    7,
    64,
)  # of a table, in turn; the service takes 1024 unless told otherwise
_IMAGE, _JSON = "application/octet-stream", "application/json"


@dataclass(frozen=True)
class ServiceChoice:
    """What the service was asked to run and what it runs, by its own `/model`."""

    requested: Execution  # with the backend "http"
    actual: Execution
    behind: Execution  # the runtime behind HTTP


@dataclass(frozen=True)
class RowPayload:
    """One test row as a client sends it."""

    position: int  # among the test rows
    row_id: str
    content: bytes  # an encoded image, or one row as a JSON object
    content_type: str = _IMAGE


@dataclass(frozen=True)
class ServiceMeasurement:
    """What the service answered. Both measurements have the same latency, of a request with one row, and the same throughput."""

    alone: Measurement  # each row in a request of its own
    together: (
        Measurement | None
    )  # several rows in a request; None for images, of which a request holds one


def raw_payloads(data: DataParams, contract: InputContract, rows: TestRows) -> Iterator[RowPayload]:
    """The test rows as they lie in the raw data: encoded images, or rows of a table as JSON objects."""
    wanted = set(rows.sources)
    if isinstance(contract, ColumnContract):
        return row_payloads(read_json_rows(data, contract.columns, wanted), rows)
    return original_payloads(read_samples(data, wanted=wanted), rows)


def original_payloads(samples: Iterable[RawSample], rows: TestRows) -> Iterator[RowPayload]:
    """The raw samples as payloads of the test rows; IntegrityError if one is not the row that was packed, or is missing."""
    found = ((sample.source, _image_id(sample), sample.payload) for sample in samples)
    return _payloads(found, rows, _IMAGE)


def row_payloads(
    raw: Iterable[tuple[str, str, Mapping[str, Any]]], rows: TestRows
) -> Iterator[RowPayload]:
    """The same of (source, id, JSON object) of a table's rows; ValueError if a number is not finite."""
    found = (
        (source, row_id, json.dumps(row, allow_nan=False, ensure_ascii=False).encode())
        for source, row_id, row in raw
    )
    return _payloads(found, rows, _JSON)


def _image_id(sample: RawSample) -> str | None:
    return None if sample.fault else files.sha256_bytes(sample.payload)[:_ID_DIGITS]


def _payloads(
    found: Iterable[tuple[str, str | None, bytes]], rows: TestRows, content_type: str
) -> Iterator[RowPayload]:
    positions = {source: position for position, source in enumerate(rows.sources)}
    missing = set(positions)
    for source, row_id, content in found:
        if source not in missing or row_id != rows.ids[positions[source]]:
            raise IntegrityError(
                f"{source} changed since it was packed. Run `dvc repro`, which starts at the changed data."
            )
        missing.remove(source)
        yield RowPayload(positions[source], row_id, content, content_type)
    if missing:
        raise IntegrityError(
            f"{len(missing)} test rows are gone from the raw data, the first is {min(missing)}. Run `dvc repro`."
        )


class ServiceClient:
    """Asks a running service for the answers of a bundle. Columns come in the order of `classes`, the network's own."""

    def __init__(self, url: str, bundle: LoadedBundle, classes: list[str]) -> None:
        limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=30.0, limits=limits)
        self._bundle = bundle
        self._classes = classes
        self._calibration = bundle.manifest.calibration

    def __enter__(self) -> "ServiceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def choice(self) -> ServiceChoice:
        """What the service runs, whose calibration is the measure of its answers; ParityError if `/model` is of another bundle or form."""
        card = self._ask("/model", self._client.build_request("GET", "/model"))
        try:
            execution, found = card["execution"], card["model_version"]
            behind = Execution.model_validate(execution["actual"])
            asked = {
                name: execution["requested"].get(name, "auto")
                for name in ("provider", "precision", "variant")
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ParityError(
                f"/model does not say what the service runs ({error!r}). Serve with the same Slipway version."
            ) from error
        self._check_version(found, "/model")
        self._calibration = self._bundle.manifest.calibration_of(behind.variant)
        return ServiceChoice(
            requested=Execution(backend="http", **asked),
            actual=behind.model_copy(update={"backend": "http"}),
            behind=behind,
        )

    def measure(
        self, payloads: Iterator[RowPayload], num_rows: int, timing_rounds: int, actual: Execution
    ) -> ServiceMeasurement:
        """Send every payload once, several at a time, then one again and again for the latency of one row.

        Rows of a table are then sent once more, several in a request.
        """
        is_table = isinstance(self._bundle.manifest.input, ColumnContract)
        outputs = np.full(
            (num_rows, max(len(self._classes), 1) + 1), math.nan, dtype=np.float32
        )  # the score is the last column
        outputs_together = outputs.copy()
        seconds, first = 0.0, None
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            for chunk in _chunks(payloads):
                first = first or chunk[0]
                start = time.perf_counter()
                answers = list(pool.map(self.predict, chunk))
                seconds += time.perf_counter() - start
                outputs[_positions(chunk)] = answers
                groups = _groups(chunk) if is_table else []
                for group, rows in zip(
                    groups, pool.map(self.predict_together, groups), strict=True
                ):
                    outputs_together[_positions(group)] = rows
        assert first is not None, "a test split is never empty"
        latency = statistics.median(self._timed(first) for _ in range(timing_rounds))
        speed, scores = num_rows / seconds, outputs[:, -1]
        alone = Measurement(
            actual,
            outputs[:, :-1],
            latency * 1000,
            speed,
            scores=scores,
            calibration=self._calibration,
        )
        together = replace(alone, outputs=outputs_together[:, :-1], scores=outputs_together[:, -1])
        return ServiceMeasurement(alone, together if is_table else None)

    def predict(self, payload: RowPayload) -> NDArray[np.float32]:
        """(columns + 1,) float32: the service's answer for one row, and its outlier score; ParityError, naming the row, if it is none."""
        what = f"row {payload.row_id}"
        answer = self._post(what, payload.content, payload.content_type)
        try:
            return self._columns(answer)
        except (KeyError, TypeError, ValueError) as error:
            raise _of_another_form(what, answer) from error

    def predict_together(self, payloads: list[RowPayload]) -> NDArray[np.float32]:
        """(rows, columns + 1) float32: the answers for several rows of a table that are sent in one request."""
        what = f"{len(payloads)} rows in one request, from row {payloads[0].row_id}"
        content = b'{"rows":[' + b",".join(payload.content for payload in payloads) + b"]}"
        answer = self._post(what, content, _JSON)
        try:
            answers = [self._columns(prediction) for prediction in answer["predictions"]]
        except (KeyError, TypeError, ValueError) as error:
            raise _of_another_form(what, answer) from error
        if len(answers) != len(payloads):
            raise ParityError(f"{what}: the service gave {len(answers)} predictions.")
        return np.stack(answers)

    def _post(self, what: str, content: bytes, content_type: str) -> dict[str, Any]:
        request = self._client.build_request(
            "POST", "/predict", content=content, headers={"content-type": content_type}
        )
        answer = self._ask(what, request)
        self._check_version(answer.get("model_version"), what)
        return answer

    def _columns(self, answer: dict[str, Any]) -> NDArray[np.float32]:
        score, calibration = np.float32(answer["outlier_score"]), self._calibration
        if answer["is_outlier"] is not bool(calibration.is_outlier(score)):
            raise ValueError("outlier_score and is_outlier do not go together")
        if not self._classes:
            interval = calibration.interval(answer["value"])
            if answer["interval"] != (interval and list(interval)):
                raise ValueError("value and interval do not go together")
            return np.array([answer["value"], score], dtype=np.float32)
        columns = np.array(
            [answer["probabilities"][name] for name in self._classes], dtype=np.float32
        )
        if len(answer["probabilities"]) != len(self._classes) or answer["probabilities"][
            answer["label"]
        ] != float(columns.max()):
            raise ValueError("label and probabilities do not go together")
        inside = {
            name
            for name, is_inside in zip(
                self._classes, calibration.prediction_sets(columns), strict=True
            )
            if is_inside
        }
        if len(answer["prediction_set"]) != len(inside) or set(answer["prediction_set"]) != inside:
            raise ValueError("probabilities and prediction_set do not go together")
        return np.append(columns, score)

    def _timed(self, payload: RowPayload) -> float:
        start = time.perf_counter()
        self.predict(payload)
        return time.perf_counter() - start

    def _check_version(self, found: object, what: str) -> None:
        if found != self._bundle.version:
            raise ParityError(
                f"{what}: the service answered as model {found!r}, expected {self._bundle.version!r}."
            )

    def _ask(self, what: str, request: httpx.Request) -> dict[str, Any]:
        try:
            answer = self._client.send(request)
        except httpx.HTTPError as error:
            raise ParityError(f"{what}: the service gave no answer ({error!r}).") from error
        if answer.status_code != httpx.codes.OK:
            raise ParityError(
                f"{what}: the service answered {answer.status_code} {answer.text[:300]}, expected 200."
            )
        try:
            content = answer.json()
        except ValueError as error:
            raise ParityError(
                f"{what}: the service answered {answer.text[:300]!r}, expected JSON."
            ) from error
        if not isinstance(content, dict):
            raise ParityError(
                f"{what}: the service answered {type(content).__name__}, expected one object."
            )
        return content


def _chunks(payloads: Iterator[RowPayload]) -> Iterator[list[RowPayload]]:
    while chunk := list(itertools.islice(payloads, _CHUNK_ROWS)):
        yield chunk


def _groups(chunk: list[RowPayload]) -> list[list[RowPayload]]:
    """The rows of a chunk, cut into requests of different sizes."""
    rows, sizes = iter(chunk), itertools.cycle(_ROWS_IN_A_REQUEST)
    return list(iter(lambda: list(itertools.islice(rows, next(sizes))), []))


def _positions(payloads: list[RowPayload]) -> list[int]:
    return [payload.position for payload in payloads]


def _of_another_form(what: str, answer: dict[str, Any]) -> ParityError:
    return ParityError(
        f"{what}: the service answered {str(answer)[:300]}, which is not of the form in docs/serving.md."
    )
