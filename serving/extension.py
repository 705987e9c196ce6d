"""The record by which an optional feature hooks into the service. serving/extensions.py lists all of them.

An extension imports the core (application, worker, endpoints and what they use); the core never imports an extension, and no
extension imports another. docs/decisions/0022-extensions-of-the-service.md says why.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serving.http.callers import CallerCheck
from serving.http.routes import Routes
from serving.metrics.sampling import MetricsSource
from serving.settings import Settings, SettingsSection

if TYPE_CHECKING:
    from serving.worker import ModelWorker

StatusPart = Callable[[], dict[str, Any] | None]


@dataclass(frozen=True)
class Hooks:
    """The parts that one extension adds to one worker. An extension fills in only what it needs.

    While the service runs, an extension may also set `ModelWorker.router` and add to `ModelWorker.observers`.
    """

    routes: Routes = field(default_factory=dict)
    caller_check: CallerCheck | None = None  # decides who may call, in place of LoopbackOnly
    select_model: Callable[[], Settings] | None = None  # the settings to load the first model with
    on_wrong_answer: Callable[[str], None] | None = None  # takes a model version; on any thread
    model_info: Callable[[], dict[str, Any]] | None = None  # further keys of `GET /model`
    status: Mapping[str, StatusPart] = field(default_factory=dict)  # parts of `GET /status`
    gauges: Sequence[MetricsSource] = ()  # sampled every few seconds
    start: Callable[[], None] | None = None  # on the event loop, when loading begins
    stop: Callable[[], Awaitable[None]] | None = None  # before the model is retired
    close: Callable[[], Awaitable[None]] | None = None  # after the last answer


@dataclass(frozen=True)
class Extension:
    """One entry of the list. `attach` registers the extension's metrics and returns its hooks.

    `allows_remote` and `initial_settings` are called in the server process too, before any worker starts.
    """

    name: str
    attach: Callable[["ModelWorker"], Hooks]
    settings: type[SettingsSection] | None = None
    allows_remote: Callable[[Settings], bool] | None = None
    initial_settings: Callable[[Settings], Settings] | None = None
