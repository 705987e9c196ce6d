"""The interface of extensions, the optional features in slipway/serving/extensions.py.

An extension may import the core (application, worker, endpoints and below). The core never imports
an extension, and no extension imports another. The reasons are in
docs/decisions/0022-extensions-of-the-service.md.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipway.serving.http.callers import CallerCheck
from slipway.serving.http.routes import OnResponse, Routes
from slipway.serving.metrics.gauges import MetricsSource
from slipway.serving.settings import Settings, SettingsSection

if TYPE_CHECKING:
    from slipway.serving.worker import ModelWorker

StatusPart = Callable[[], dict[str, Any] | None]


@dataclass(frozen=True)
class Hooks:
    """The routes, callbacks and gauges that one extension adds to one worker. All are optional.

    At any time, an extension may also set `ModelWorker.router` and add to `ModelWorker.observers`.
    """

    routes: Routes = field(default_factory=dict)
    caller_check: CallerCheck | None = None  # replaces LoopbackOnly
    select_model: Callable[[], Settings] | None = None  # returns the settings for the first model
    on_wrong_answer: Callable[[str], None] | None = None  # takes a model version; any thread
    model_info: Callable[[], dict[str, Any]] | None = None  # further keys of `GET /model`
    status: Mapping[str, StatusPart] = field(default_factory=dict)  # parts of `GET /status`
    gauges: Sequence[MetricsSource] = ()  # sources that are sampled every few seconds
    on_response: OnResponse | None = None  # receives each sampled request that ended
    sampling_rate: float = 1.0  # fraction of the requests that `on_response` receives
    continues_traces: bool = False  # `on_response` also receives requests with a `traceparent`
    receives_faults: bool = False  # `on_response` also receives faults that are not sampled
    start: Callable[[], None] | None = None  # called on the event loop when loading begins
    stop: Callable[[], Awaitable[None]] | None = None  # awaited before the model is retired
    close: Callable[[], Awaitable[None]] | None = None  # awaited after the last answer


@dataclass(frozen=True)
class Extension:
    """An optional feature. `attach` registers its metrics and returns its hooks.

    `allows_remote`, `initial_settings` and `address` also run in the server process, before
    workers start.
    """

    name: str
    attach: Callable[["ModelWorker"], Hooks]
    settings: type[SettingsSection] | None = None
    allows_remote: Callable[[Settings], bool] | None = None
    initial_settings: Callable[[Settings], Settings] | None = None
    # Host and port of its own, and how to choose another port; None without one.
    address: Callable[[Settings], tuple[str, int, str] | None] | None = None
