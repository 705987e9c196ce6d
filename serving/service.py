"""The BentoML service: `bentoml serve` starts it, `bentoml build` packs it.

BentoML keeps processes, lifecycle, building and the description of the API. HTTP itself is answered by
the application (serving/app.py), which wraps BentoML's application. Binds to 127.0.0.1 unless told otherwise.
"""

import functools
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import bentoml
import click
from _bentoml_sdk.service import Service
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.utils.analytics.usage_stats import do_not_track
from bentoml.exceptions import BentoMLConfigException
from starlette.types import ASGIApp

from serving.api_docs.api import predict_method, read_columns, summary
from serving.app import Application
from serving.extensions import EXTENSIONS, SECTIONS
from serving.http.connections import tracked
from serving.metrics.service_metrics import end_with_server, open_server_directory
from serving.process.draining import drain_on_sigterm
from serving.process.interpreter import put_aside_what_stays, take_short_turns
from serving.process.operator_port import OperatorPort, connection_limits
from serving.settings import Settings, SettingsError, read_settings
from serving.worker import ModelWorker
from slipway.system.errors import SlipwayError
from slipway.system.malloc import keep_little_freed_memory
from slipway.system.telemetry import switch_off_telemetry


def _served_bundle(settings: Settings) -> Path:
    """The bundle that a start would serve; SLIPWAY_BUNDLE if that is not known, of which loading tells the reason."""
    for extension in EXTENSIONS:
        if extension.initial_settings:
            with suppress(SlipwayError):
                settings = extension.initial_settings(settings)
    return settings.bundle


switch_off_telemetry()
do_not_track.cache_clear()  # `bentoml` has read and cached the variable before it imports a service
try:
    SETTINGS = read_settings(SECTIONS)
except SettingsError as error:
    raise BentoMLConfigException(
        str(error)
    ) from None  # BentoML's commands print this one without a traceback
COLUMNS = read_columns(_served_bundle(SETTINGS))


@functools.cache
def worker() -> ModelWorker:
    """This process' model; made when a worker starts, not when the module is imported."""
    return ModelWorker(SETTINGS, EXTENSIONS, settle=put_aside_what_stays)


@functools.cache
def operator_port() -> OperatorPort:
    """This process' part of the second port."""
    return OperatorPort(SETTINGS)


class FrontedService(Service[Any]):  # type: ignore[misc]
    """A BentoML service whose application has our application around it."""

    def to_asgi(self, is_main: bool = True) -> ASGIApp:
        """The application that a worker serves; behind another service (`bentoml.depends`) it is BentoML's own."""
        bentoml_application: ASGIApp = super().to_asgi(is_main)
        if not is_main:
            return bentoml_application
        application = Application(bentoml_application, worker())
        connection_limits(worker()).replace_uvicorns_default()
        operator_port().serve(worker(), application.for_operators())
        return tracked(application)

    @property
    def labels(self) -> dict[str, str]:
        """A bento's labels. BentoML reads them when it builds one and never else: where there is no certified bundle, none is built."""
        from serving.process.packing import bento_labels

        try:
            return bento_labels()
        except SlipwayError as error:
            raise BentoMLConfigException(
                f"no bento is built of what is not certified: {error}"
            ) from None

    @labels.setter
    def labels(self, _: dict[str, str]) -> None:
        """BentoML sets an empty mapping when a service is made."""

    @property
    def doc(self) -> str:
        """The text above the description of the API, in place of BentoML's with its badges from elsewhere."""
        return summary(COLUMNS)


@bentoml.service(
    name="slipway",
    service_class=FrontedService,
    workers=SETTINGS.workers,
    http={"host": "127.0.0.1", "port": 3000},
    # The application has its own metrics and guards; BentoML's cost a millisecond for each request.
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    traffic={"timeout": SETTINGS.request_timeout_s},
)
class Slipway:
    """Predicts the label, or the value, of an image or of a table's row."""

    @bentoml.on_deployment  # type: ignore[untyped-decorator]
    @staticmethod
    def prepare() -> None:
        """Once, before any worker starts: what stands against listening is one line, not a traceback of the process manager."""
        # What only the server process needs, not its workers.
        from serving.process.binding import require_safe_start
        from serving.process.supervising import supervise

        supervise()
        open_server_directory(Path(BentoMLContainer.bentoml_home.get()) / "slipway_metrics")
        context = click.get_current_context(silent=True)
        if context is not None:
            host = context.params.get("host") or BentoMLContainer.http.host.get()
            try:
                require_safe_start(
                    SETTINGS,
                    EXTENSIONS,
                    host,
                    context.params.get("port") or BentoMLContainer.http.port.get(),
                )
            except SlipwayError as error:
                raise BentoMLConfigException(str(error)) from None

    @bentoml.on_startup  # type: ignore[untyped-decorator]
    async def start(self) -> None:
        """Begin to load the model."""
        end_with_server()
        take_short_turns()
        keep_little_freed_memory()
        drain_on_sigterm(worker())
        logging.getLogger("python_multipart").setLevel(
            logging.ERROR
        )  # it warns of every malformed form
        worker().start()
        await operator_port().open()
        if SETTINGS.workers > 1:
            # They share one socket: one that is still loading must not take connections that another could answer.
            await worker().loaded()

    @bentoml.on_shutdown  # type: ignore[untyped-decorator]
    async def stop(self) -> None:
        """Let the queue run empty."""
        await worker().stop()
        await operator_port().close()

    async def __is_ready__(self) -> bool:
        return worker().model is not None and not worker().is_draining

    predict = predict_method(
        COLUMNS, lambda payload, request_id: worker().predict(payload, request_id)
    )
