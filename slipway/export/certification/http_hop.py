"""Sends the original images, or the raw rows of a table, to the running service over HTTP.

Rows of a table are sent twice: each in its own request, and several in one. An error is raised for
raw data that changed since packing, for responses of another model version, and for responses that
are not in the declared format.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution
from slipway.artifacts.predictions import prediction_columns
from slipway.config.sections import DataParams
from slipway.export.certification.measurement import Measurement, TestRows
from slipway.export.certification.raw_rows import RawRowPositions
from slipway.export.certification.service_process import ANSWER_DEADLINE_S
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind
from slipway.system.errors import ParityError

_CONNECTIONS = 8
_CONNECT_S = 30.0
_CHUNK_ROWS = 256  # payloads held in memory at a time
_REQUEST_ROWS = (1, 2, 7, 64)  # rows of a table per request, in turn; the default limit is 1024
_JSON = "application/json"
RawRow = tuple[str, str | None, bytes]  # source, id, and the row as a client sends it
# The answer as it came, for messages, and the prediction for each row.
Predictions = tuple[object, Any]
_MAX_SHOWN = 300  # characters of an answer in a message


@dataclass(frozen=True)
class ServiceChoice:
    """The execution that the service is configured for, and the one that `/model` reports."""

    requested: Execution  # execution with the backend "http" or "grpc"
    actual: Execution
    behind: Execution  # the runtime behind it


@dataclass(frozen=True)
class RowPayload:
    """One test row in the form in which a client sends it."""

    position: int  # among the test rows
    row_id: str
    content: bytes  # an encoded image, or one row as a JSON object
    content_type: str


def raw_payloads(data: DataParams, contract: InputContract, rows: TestRows) -> Iterator[RowPayload]:
    """Read the test rows from the raw data: encoded images, or rows of a table as JSON objects."""
    kind = input_kind(contract.kind)
    read: Callable[[DataParams, InputContract, set[str]], Iterable[RawRow]]
    read = kind.load_part("raw_rows")
    return payloads_of(read(data, contract, set(rows.sources)), rows, kind.content_type)


def payloads_of(found: Iterable[RawRow], rows: TestRows, content_type: str) -> Iterator[RowPayload]:
    """Match raw rows to the test rows.

    Raises:
        IntegrityError: a row is not the one that was packed, or is missing.
    """
    positions = RawRowPositions(rows.ids, rows.sources)
    for source, digest, content in found:
        position = positions.take(source, digest)
        yield RowPayload(position, rows.ids[position], content, content_type)
    positions.check_all_taken()


class ServiceClient:
    """Requests predictions from a running service; columns are in the order of `classes`."""

    backend: Literal["http", "grpc"] = "http"

    def __init__(self, url: str, bundle: LoadedBundle, classes: list[str]) -> None:
        waits = httpx.Timeout(ANSWER_DEADLINE_S, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=waits, limits=limits)
        self.bundle = bundle
        self._classes = classes
        self.calibration = bundle.manifest.calibration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def choice(self) -> ServiceChoice:
        """Read the service's variant from `/model`; predictions must then fit its calibration.

        Raises:
            ParityError: `/model` is of another bundle, or has another form.
        """
        info = self._ask("/model", self._client.build_request("GET", "/model"))
        try:
            execution, version = info["execution"], info["model_version"]
            behind = Execution.model_validate(execution["actual"])
            requested = {
                name: execution["requested"].get(name, "auto")
                for name in ("provider", "precision", "variant")
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ParityError(
                f"/model does not say what the service runs ({error!r}). "
                "Serve with the same Slipway version."
            ) from error
        self.check_version(version, "/model")
        self.calibration = self.bundle.manifest.calibration_of(behind.variant)
        return ServiceChoice(
            requested=Execution(backend=self.backend, **requested),
            actual=behind.model_copy(update={"backend": self.backend}),
            behind=behind,
        )

    def measure(
        self, payloads: Iterator[RowPayload], num_rows: int, timing_rounds: int, actual: Execution
    ) -> tuple[Measurement, Measurement | None]:
        """Send every payload once, several at a time, then one repeatedly to measure its latency.

        Returns:
            The predictions from requests with one row, and from requests with several rows. For
            images the latter is None, because a request holds one image. Both report the same
            speed.
        """
        many_per_request = input_kind(self.bundle.manifest.input.kind).many_per_request
        num_columns = max(len(self._classes), 1) + 1  # the OOD score is the last
        single = np.full((num_rows, num_columns), math.nan, dtype=np.float32)
        grouped = single.copy()
        seconds, first = 0.0, None
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            while chunk := list(itertools.islice(payloads, _CHUNK_ROWS)):
                first = first or chunk[0]
                start = time.perf_counter()
                answers = list(pool.map(self.predict, chunk))
                seconds += time.perf_counter() - start
                single[_positions(chunk)] = answers
                groups = _groups(chunk) if many_per_request else []
                for group, rows in zip(groups, pool.map(self.predict_group, groups), strict=True):
                    grouped[_positions(group)] = rows
        assert first is not None, "a test split is never empty"

        times = []
        for _ in range(timing_rounds):
            start = time.perf_counter()
            self.predict(first)
            times.append(time.perf_counter() - start)
        measured = Measurement(
            actual,
            single[:, :-1],
            latency_ms=statistics.median(times) * 1000,
            rows_per_second=num_rows / seconds,
            scores=single[:, -1],
            calibration=self.calibration,
        )
        if not many_per_request:
            return measured, None
        return measured, replace(measured, outputs=grouped[:, :-1], scores=grouped[:, -1])

    def predict(self, payload: RowPayload) -> NDArray[np.float32]:
        """Return the prediction for one row followed by its OOD score, (columns + 1,).

        Raises:
            ParityError: the response is not a prediction; the message names the row.
        """
        what = f"row {payload.row_id}"
        columns: NDArray[np.float32] = self._columns(what, *self.predictions(what, [payload]))[0]
        return columns

    def predict_group(self, payloads: list[RowPayload]) -> NDArray[np.float32]:
        """Return predictions and OOD scores for the rows of one request, (rows, columns + 1)."""
        what = f"{len(payloads)} rows in one request, from row {payloads[0].row_id}"
        columns = self._columns(what, *self.predictions(what, payloads, is_list=True))
        if len(columns) != len(payloads):
            raise ParityError(
                f"{what}: the service gave {len(columns)} predictions, expected {len(payloads)}."
            )
        return columns

    def predictions(
        self, what: str, payloads: list[RowPayload], is_list: bool = False
    ) -> Predictions:
        """Send one request and return its predictions; with `is_list` it holds a list of rows."""
        content, content_type = payloads[0].content, payloads[0].content_type
        if is_list:
            content_type = _JSON
            content = b'{"rows":[' + b",".join(payload.content for payload in payloads) + b"]}"
        request = self._client.build_request(
            "POST", "/predict", content=content, headers={"content-type": content_type}
        )
        answer = self._ask(what, request)
        self.check_version(answer.get("model_version"), what)
        return answer, answer.get("predictions") if is_list else [answer]

    def check_version(self, found: object, what: str) -> None:
        """Raise ParityError if a response is from another model than the bundle's."""
        if found != self.bundle.version:
            raise ParityError(
                f"{what}: the service answered as model {found!r}, "
                f"expected {self.bundle.version!r}."
            )

    def _columns(self, what: str, answer: object, predictions: Any) -> NDArray[np.float32]:
        try:
            columns = [
                prediction_columns(prediction, self._classes, self.calibration)
                for prediction in predictions
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ParityError(
                f"{what}: the service answered {str(answer)[:_MAX_SHOWN]}, "
                "which is not in the format of docs/reference/serving.md."
            ) from error
        return np.array(columns, np.float32)

    def _ask(self, what: str, request: httpx.Request) -> dict[str, Any]:
        try:
            answer = self._client.send(request)
        except httpx.HTTPError as error:
            raise ParityError(f"{what}: the service gave no answer ({error!r}).") from error
        text = answer.text[:_MAX_SHOWN]
        if answer.status_code != httpx.codes.OK:
            raise ParityError(
                f"{what}: the service answered {answer.status_code} {text}, expected 200."
            )
        try:
            content = answer.json()
        except ValueError as error:
            raise ParityError(f"{what}: the service answered {text!r}, expected JSON.") from error
        if not isinstance(content, dict):
            raise ParityError(
                f"{what}: the service answered {type(content).__name__}, expected one object."
            )
        return content


def _groups(chunk: list[RowPayload]) -> list[list[RowPayload]]:
    """Divide rows into groups of different sizes, each for one request."""
    rows, sizes = iter(chunk), itertools.cycle(_REQUEST_ROWS)
    return list(iter(lambda: list(itertools.islice(rows, next(sizes))), []))


def _positions(payloads: list[RowPayload]) -> list[int]:
    return [payload.position for payload in payloads]
