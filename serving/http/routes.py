"""What a path leads to: the methods it takes, who may call it, what answers, and what the description of the API says of it.

An endpoint's module in serving/endpoints/ makes its routes; the front finds the one of a request. A path that ends with `/*` stands
for everything below it, and one with `/*/` before its last part for any name there, so that a path that a caller made up never becomes
the label of a metric.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from serving.http.incoming import Incoming
from serving.http.responses import Refusal, Response
from slipway.artifacts.bundle import Bundle

READING = ("GET", "HEAD")
Headers = Mapping[bytes, bytes]  # by their names in lower case
Access = Literal[
    "open", "caller", "operator"
]  # anybody who reaches the port; who may ask the model; who runs the service


@dataclass
class Request:
    """One request on its way."""

    id: str
    method: str
    path: str  # decoded, without its query
    query: bytes
    headers: Headers
    receive: Incoming
    started: float  # perf_counter seconds
    caller: str | None = None  # the name of its key, once the gate has let it pass


@dataclass(frozen=True)
class Operation:
    """What the description of the API says of a route. Schemas are those of OpenAPI 3.0, by media type."""

    summary: str
    takes: Mapping[str, Any] = field(default_factory=dict)  # of the body; empty: there is none
    answers: Mapping[str, Any] = field(default_factory=dict)  # with status 200
    errors: tuple[str, ...] = ()  # codes of ERRORS, beside those of every route
    example: str = ""  # what curl is given beside the address


@dataclass(frozen=True)
class ErrorShape:
    """Another shape of errors than `error_response`, for a protocol that prescribes one."""

    name: str  # of its schema in the OpenAPI document
    schema: Mapping[str, Any]
    respond: Callable[[Refusal, str], Response]  # takes the request id


Handler = Callable[[Request], Awaitable[Response]]
Describe = Callable[[Bundle | None], Operation]  # of the model that is served, or of none


@dataclass(frozen=True)
class Route:
    """One path, or with `/*` all below it, or with `/*/` before its last part any name there."""

    methods: tuple[str, ...]
    handler: Handler | None  # None: BentoML's application behind the front answers
    access: Access
    describe: Describe | None = None
    error_shape: ErrorShape | None = None  # None: as `error_response`


Routes = dict[str, Route]


def always(operation: Operation) -> Describe:
    """The same for every model."""
    return lambda bundle: operation


def find_route(routes: Routes, path: str) -> str | None:
    """The key of the route that `path` leads to: itself, the one for any name before its last part, or the `/*` of its first part.

    None where there is nothing. Where there is a `/*`, slashes at the end change nothing.
    """
    if path in routes:
        return path
    below = f"/{path[1:].partition('/')[0]}/*"
    if below not in routes:
        return None
    path = path.rstrip("/")
    before, _, last = path.rpartition("/")
    of_any_name = f"{before.rpartition('/')[0]}/*/{last}"
    return next((key for key in (path, of_any_name) if key in routes), below)
