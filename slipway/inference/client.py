"""A client of a running service, which returns the same types as a model in this process."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self

import httpx

from slipway.inference.images import image_bytes, image_list
from slipway.inference.json_rows import json_row
from slipway.inference.predictions import (
    Explanation,
    Predictions,
    explanation_of,
    index_of,
    prediction_of,
)
from slipway.inputs.multipart import encode_images
from slipway.system.errors import DataError, SlipwayError, UnavailableError

_BUSY = (429, 502, 503, 504)  # the same request may be answered later
_FIRST_WAIT_S = 0.2  # doubles with each try, unless the service sends Retry-After
_Request = tuple[str, bytes]  # content type and body


class ServiceError(SlipwayError):
    """The service refused a request; docs/reference/serving.md lists each `code`.

    >>> try:
    ...     client.predict([row | {"age": "old"}])
    ... except slipway.ServiceError as error:
    ...     print(error.status, error.code, error.field)
    422 type_violation rows[0].age
    """

    def __init__(self, status: int, error: Mapping[str, Any]) -> None:
        super().__init__(f"{status} {error.get('code')}: {error.get('message')}")
        self.status = status  # of HTTP, 400 to 599
        self.code = error.get("code")  # such as "type_violation"; None from something else
        self.field = error.get("field")  # the bad item or cell
        self.request_id = error.get("request_id")  # as in the log of the service


class Client:
    """A client of one service, safe to share between threads. `close` it, or use it in a `with`.

    >>> with slipway.Client(url) as client:
    ...     print(type(client.predict(row)).__name__)
    ClassPrediction
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout_s: float = 30.0,
        max_wait_s: float = 60.0,
        max_items: int = 64,
        max_rows: int = 1024,
        max_bytes: int = 15 << 20,
    ) -> None:
        """Connect to the service at `url`.

        `timeout_s` limits one try, `max_wait_s` all waits between the tries of a request.

        A list is sent in requests of at most `max_items` images or `max_rows` rows and `max_bytes`
        bytes: the default limits of the service.
        """
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s)
        self._max_wait_s = max_wait_s
        self._max_items, self._max_rows, self._max_bytes = max_items, max_rows, max_bytes

    def predict(self, given: Any) -> Any:
        """Return the answer to an image or row; a list of answers for a list or a DataFrame.

        Raises ServiceError if the service refuses an item, UnavailableError if it does not answer.

        >>> client.predict([row, row]).to_arrow().num_rows
        2
        """
        rows, is_list = _rows(given)
        if rows is not None:
            texts = (json.dumps(json_row(row), allow_nan=False).encode() for row in rows)
            groups = self._grouped(texts, self._max_rows)
            bodies = (b'{"rows":[' + b",".join(group) + b"]}" for group in groups)
            requests = [("application/json", body) for body in bodies]
        else:
            images = image_list(given)
            is_list = images is not None
            encoded = map(image_bytes, [given] if images is None else images)
            requests = [encode_images(part) for part in self._grouped(encoded, self._max_items)]
        answers = Predictions(index=index_of(given))
        for request in requests:
            content = self._ask("POST", "/predict", request)
            answers += map(prediction_of, content.get("predictions", [content]))
        return answers if is_list else answers[0]

    def explain(self, item: Any) -> Explanation:
        """Return the prediction for one image, row or text, with its explanation.

        Raises ServiceError and UnavailableError as `predict` does.

        >>> client.explain(row).kind
        'columns'
        """
        rows, is_list = _rows(item)
        if is_list or image_list(item) is not None:
            raise DataError("found a list, expected one item: explain each by itself.")
        if rows is None:
            request = encode_images([image_bytes(item)])
        else:
            body = json.dumps(json_row(rows[0]), allow_nan=False).encode()
            request = "application/json", body
        return explanation_of(self._ask("POST", "/explain", request))

    def info(self) -> dict[str, Any]:
        """Return the content of `GET /model`.

        >>> client.info()["task"]
        'table_classification'
        """
        return self._ask("GET", "/model")

    def close(self) -> None:
        """Close the connections.

        >>> client = slipway.Client(url)
        >>> client.close()
        """
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, method: str, path: str, request: _Request | None = None) -> dict[str, Any]:
        """Send a request and return the JSON response.

        While the service is busy or unreachable, the request is repeated. The waits follow the
        header `Retry-After`, or else double each time. Raises ServiceError or UnavailableError.
        """
        headers = {"content-type": request[0]} if request else {}
        body = request[1] if request else None
        left_s, wait_s = self._max_wait_s, _FIRST_WAIT_S
        while True:
            response, failure = None, ""
            try:
                response = self._http.request(method, path, content=body, headers=headers)
            except httpx.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
            if response is not None and response.status_code not in _BUSY:
                return _content(response)
            after_s = _retry_after_s(response) if response is not None else None
            pause_s = wait_s if after_s is None else after_s
            if pause_s > left_s:
                if response is not None:
                    return _content(response)
                raise UnavailableError(
                    f"{self._http.base_url} gave no answer within {self._max_wait_s:g} s of waits "
                    f"({failure}). Start the service, or correct the URL."
                )
            time.sleep(pause_s)
            left_s, wait_s = left_s - pause_s, 2 * wait_s

    def _grouped(self, items: Iterable[bytes], most: int) -> Iterator[list[bytes]]:
        group: list[bytes] = []
        num_bytes = 0
        for item in items:
            if group and (len(group) == most or num_bytes + len(item) > self._max_bytes):
                yield group
                group, num_bytes = [], 0
            group.append(item)
            num_bytes += len(item)
        if group:
            yield group


def _rows(given: Any) -> tuple[list[Mapping[str, Any]] | None, bool]:
    """Return table rows as dicts, and True if `given` is a DataFrame or a list of dicts.

    The rows are None if `given` is neither of these nor a dict, such as an image.
    """
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(given, pandas.DataFrame):
        return given.to_dict("records"), True
    if isinstance(given, Mapping):
        return [given], False
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], Mapping):
        return list(given), True
    return None, False


def _content(response: httpx.Response) -> dict[str, Any]:
    try:
        content = response.json()
    except ValueError:
        content = None
    if response.is_success and isinstance(content, dict):
        return content
    error = content.get("error") if isinstance(content, dict) else None
    if not isinstance(error, Mapping):
        error = {"code": "no_slipway", "message": response.text[:200] or response.reason_phrase}
    raise ServiceError(response.status_code, error)


def _retry_after_s(
    response: httpx.Response, now: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> float | None:
    """Return the seconds to wait from the header `Retry-After`, a number or a date.

    None if the response has no valid one.
    """
    text = response.headers.get("retry-after", "")
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - now()).total_seconds())
    except (ValueError, TypeError):
        return None
