"""What a path leads to: the methods it takes, who may call it, and what answers.

An endpoint's module in serving/endpoints/ makes its routes; the front finds the one of a request. A path that ends with `/*` stands
for everything below it, so that a path that a caller made up never becomes the label of a metric.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from starlette.types import Receive

from serving.reading import Headers
from serving.responses import Response

READING = ("GET", "HEAD")
Access = Literal["open", "caller", "operator"]  # anybody who reaches the port; who may ask the model; who runs the service


@dataclass
class Request:
    """One request on its way."""

    id: str
    method: str
    path: str  # decoded, without its query
    query: bytes
    headers: Headers
    receive: Receive
    started: float  # perf_counter seconds


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One path, or with `/*` all below it."""

    methods: tuple[str, ...]
    handler: Handler | None  # None: BentoML's application behind the front answers
    access: Access


Routes = dict[str, Route]


def find_route(routes: Routes, path: str) -> str | None:
    """The key of the route that `path` leads to: itself, or the `/*` of its first part; None where there is nothing."""
    if path in routes:
        return path
    below = f"/{path[1:].partition('/')[0]}/*"
    return below if below in routes else None
