"""Routes (path, methods, access, handler, description) and the request that a handler gets.

Endpoints create routes; the application finds the route of a request. A path that ends in `/*`
matches everything below it, and `/*/` before the last part matches any name there. So a path that a
caller invents never becomes a metric label.
"""

import os
import re
import secrets
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slipway.artifacts.bundle import Bundle
from slipway.serving.http.refusal_log import Peer
from slipway.serving.http.request_body import RequestBody
from slipway.serving.http.responses import Refusal, Response, error_response

READING = ("GET", "HEAD")
FAULT = 500  # from this status on, a response is a fault of the service
STAGES = ("read", "decode", "queue", "infer", "encode")  # stages of a prediction, in this order
Headers = Mapping[bytes, bytes]  # values by lower-case name
# For everybody who reaches the port; for clients of the model; for those who run the service.
Access = Literal["open", "caller", "operator"]

_VALID_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_ID_BYTES = 8  # random bytes in each request id
_IDS_PER_READ = 256  # reading randomness for each id costs more than the rest of its creation
_unused_ids: list[str] = []
os.register_at_fork(after_in_child=_unused_ids.clear)


@dataclass(slots=True)
class RequestTrace:
    """The stages, model and number of rows of one request, recorded if an extension samples it."""

    # Begin and end of the first stages of STAGES, those that took place, in perf_counter seconds.
    # Extensions keep it for a while, and one tuple costs half of what a pair for each stage would.
    times: tuple[float, ...] = ()
    model_version: str | None = None  # version of the model that answered, or failed to answer
    num_rows: int | None = None  # number of answered rows
    trace_id: str | None = None  # id of the distributed trace, set by an extension
    readers: "tuple[OnResponse, ...]" = ()  # hooks that receive the request when it ended
    is_recorded: bool = True  # False for a fault that was not sampled: all above is unknown

    def stages(self) -> Iterator[tuple[str, float, float]]:
        """Yield name, begin and end of each stage that took place, in seconds of the clock."""
        return zip(STAGES, self.times[::2], self.times[1::2], strict=False)


@dataclass
class Request:
    """A request that the service is handling."""

    id: str
    method: str
    path: str  # decoded, without the query
    query: bytes
    headers: Headers
    body: RequestBody
    started: float  # perf_counter seconds
    caller: str | None = None  # name of the caller's key, once authenticated
    peer: Peer = None
    trace: RequestTrace | None = None  # None: no extension samples the request


@dataclass(slots=True)
class Exchange:
    """A request that has ended, with its outcome, for the extensions' hook `on_response`."""

    request_id: str
    method: str  # empty if it was refused before it was read
    route: str  # a key of the routes, or "other"
    status: int | None  # None: the client disconnected
    error: str | None  # code of the error; None if there was none
    caller: str | None  # name of the caller's key
    started: float  # perf_counter seconds, like the next
    ended: float
    trace: RequestTrace


# Returns further headers of the response. Called on the event loop; never waits, never raises.
OnResponse = Callable[[Exchange, Headers], tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Operation:
    """Describes a route for the OpenAPI document. Schemas of bodies are by media type."""

    summary: str
    takes: Mapping[str, Any] = field(default_factory=dict)  # schemas of the body; empty: no body
    # Schemas of the answers with `statuses`, or of GET's answer with 200.
    answers: Mapping[str, Any] = field(default_factory=dict)
    errors: tuple[str, ...] = ()  # codes of ERRORS, in addition to those of every route
    example: str = ""  # arguments of curl that send an example
    statuses: tuple[int, ...] = (200,)
    requires_body: bool = True  # False if the body may be omitted


@dataclass(frozen=True)
class ErrorShape:
    """The error format of a protocol, which replaces `error_response`."""

    name: str  # name of its schema in the OpenAPI document
    schema: Mapping[str, Any]
    respond: Callable[[Refusal, str], Response]  # from refusal and request id


Handler = Callable[[Request], Awaitable[Response]]
Describe = Callable[[Bundle | None], Operation]  # takes the served bundle's manifest, if any


@dataclass(frozen=True)
class Route:
    """A path or a pattern of paths, with its methods, access rule and handler."""

    methods: tuple[str, ...]
    handler: Handler | None  # None: BentoML's application answers
    access: Access
    describe: Describe | None = None
    error_shape: ErrorShape | None = None  # None: as `error_response`
    is_probe: bool = False  # answers not_ready as any other state, not as a refusal
    is_unknown: bool = False  # the handler refuses the path itself, whatever the method


Routes = dict[str, Route]


def always(operation: Operation) -> Describe:
    return lambda bundle: operation


def find_route(routes: Routes, path: str) -> str | None:
    """Return the key of a path's route, or None if nothing matches.

    The keys tried for `/v2/models/m/infer`, in order: the path itself, `/v2/models/*/infer`,
    `/v2/models/m/*` and `/v2/*`. Without the last key, only the path itself is tried; with it,
    trailing slashes are ignored.
    """
    if path in routes:
        return path
    below = f"/{path[1:].partition('/')[0]}/*"
    if below not in routes:
        return None
    path = path.rstrip("/")
    before, _, last = path.rpartition("/")
    any_name = f"{before.rpartition('/')[0]}/*/{last}"
    return next((key for key in (path, any_name, f"{before}/*") if key in routes), below)


def error_shape_of(routes: Routes, path: str) -> Callable[[Refusal, str], Response]:
    """Return the function that creates error responses for a path.

    Paths of a protocol with its own error format use that format, also if no route matches.
    """
    found = find_route(routes, path)
    shape = routes[found].error_shape if found else None
    return shape.respond if shape else error_response


def request_id_of(headers: Headers) -> str:
    """Return the caller's `x-request-id` if it is valid, otherwise a new id."""
    given = headers.get(b"x-request-id")
    return given.decode() if given and _VALID_ID.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    """Return 16 random hex digits. Call it on the event loop only."""
    if not _unused_ids:
        digits, width = secrets.token_hex(_ID_BYTES * _IDS_PER_READ), 2 * _ID_BYTES
        _unused_ids.extend(digits[at : at + width] for at in range(0, len(digits), width))
    return _unused_ids.pop()


def sample_number(request_id: str) -> float:
    """Return a number from 0 to below 1. A request is in a sample if its number is below the rate.

    The number depends only on the id, so all workers agree, and a larger sample has all requests of
    a smaller one. A cryptographic digest would cost as much as recording a request.
    """
    return zlib.crc32(request_id.encode()) / 2**32
