"""The BentoML service: `bentoml serve` starts it, `bentoml build` packs it.

BentoML runs the processes, the lifecycle and the build. The application (slipway/serving/app.py)
wraps BentoML's own and answers HTTP. Binds to 127.0.0.1 by default.
"""

import functools
import json
import secrets
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import bentoml
import click
from _bentoml_sdk.service import Service
from bentoml._internal.configuration.containers import BentoMLContainer
from bentoml._internal.utils.analytics.usage_stats import do_not_track
from bentoml.exceptions import BentoMLConfigException, BentoMLException
from bentoml.validators import ContentType
from pydantic import WithJsonSchema
from starlette.types import ASGIApp

from slipway.artifacts.bundle import load_bundle
from slipway.inputs.columns import ColumnContract
from slipway.inputs.texts import TextContract
from slipway.serving.app import Application, connection_limits
from slipway.serving.extensions import EXTENSIONS, SECTIONS
from slipway.serving.http.responses import Refusal
from slipway.serving.metrics.service_metrics import open_server_directory
from slipway.serving.requests.payload import Payload
from slipway.serving.schemas import row_schema, text_schema
from slipway.serving.settings import Settings, SettingsError, read_settings
from slipway.serving.worker import ModelWorker
from slipway.system.environment import switch_off_telemetry
from slipway.system.errors import SlipwayError, linked

if TYPE_CHECKING:
    from slipway.serving.process.operator_port import OperatorPort


def _served_bundle(settings: Settings) -> Path:
    """Return the path of the bundle that the service would serve if it were started now.

    If that cannot be determined, returns SLIPWAY_BUNDLE: a worker reports the reason when it loads
    the model.
    """
    for extension in EXTENSIONS:
        if extension.initial_settings:
            with suppress(SlipwayError):
                settings = extension.initial_settings(settings)
    return settings.bundle


def _read_columns(bundle: Path) -> ColumnContract | TextContract | None:
    """Read the input contract of a bundle for tables or texts.

    None for images, or if the bundle cannot be read.
    """
    with suppress(SlipwayError):
        contract = load_bundle(bundle).manifest.input
        return contract if isinstance(contract, (ColumnContract, TextContract)) else None
    return None


switch_off_telemetry()
do_not_track.cache_clear()  # `bentoml` cached the variable before it imported the service
try:
    SETTINGS = read_settings(SECTIONS)
except SettingsError as error:
    # BentoML's commands print this exception without a traceback.
    raise BentoMLConfigException(str(error)) from None
COLUMNS = _read_columns(_served_bundle(SETTINGS))
_operator_port: "OperatorPort | None" = None  # this worker's second port, if there is one


@functools.cache
def worker() -> ModelWorker:
    """Return the ModelWorker of this process. The first call, at a worker's start, creates it."""
    from slipway.serving.process.worker_process import freeze_gc

    return ModelWorker(SETTINGS, EXTENSIONS, settle=freeze_gc)


class WrappedService(Service[Any]):  # type: ignore[misc]
    """A BentoML service whose ASGI application is wrapped by Slipway's `Application`."""

    def to_asgi(self, is_main: bool = True) -> ASGIApp:
        """Return Slipway's application, or BentoML's own if another service depends on this one."""
        bentoml_application: ASGIApp = super().to_asgi(is_main)
        if not is_main:
            return bentoml_application
        application = Application(bentoml_application, worker())
        connection_limits(worker()).replace_uvicorns_default()
        if SETTINGS.admin_port:
            from slipway.serving.process.operator_port import OperatorPort

            global _operator_port
            _operator_port = OperatorPort(worker(), application.for_operators())
        return application

    @property
    def labels(self) -> dict[str, str]:
        """The labels of a bento. BentoML reads them only in a build, before it copies files."""
        from slipway.serving.process.packing import bento_labels, write_build_files

        try:
            labels = bento_labels()
            write_build_files()
        except SlipwayError as error:
            raise BentoMLConfigException(f"cannot build a bento: {error}") from None
        return labels

    @labels.setter
    def labels(self, _: dict[str, str]) -> None:
        """Ignore the empty mapping that BentoML assigns when it creates a service."""

    @property
    def doc(self) -> str:
        """The introduction to BentoML's description of the API."""
        if COLUMNS is None:
            text = "Send one image to /predict, or several as files of a form"
        else:
            text = 'Send one row to /predict as a JSON object, or several as {"rows": [...]}'
        text += '. The answers to several are in {"predictions": [...]}.'
        if COLUMNS and COLUMNS.ignored:
            text += f" Ignored columns: {', '.join(COLUMNS.ignored)}."
        shape = "{error: {code, message, field, request_id}}"
        return linked(f"{text} Errors have one shape: {shape}. See docs/reference/serving.md.")


async def _answer(payload: Payload) -> dict[str, Any]:
    try:
        return await worker().predict(payload, secrets.token_hex(8))
    except Refusal as refusal:
        raise BentoMLException(refusal.message, error_code=HTTPStatus(refusal.status)) from None


# The application answers HTTP. BentoML describes these methods, and they run behind other services.
def _method_of_images() -> Any:
    async def predict(self: Any, image: Annotated[Path, ContentType("image/*")]) -> dict[str, Any]:
        """Predict one image: its label or value, with uncertainty and OOD score."""
        return await _answer(Payload("images", (image.read_bytes(),)))

    return bentoml.api(predict)


def _method_of_rows(columns: ColumnContract | TextContract) -> Any:
    row = text_schema(columns) if isinstance(columns, TextContract) else row_schema(columns)
    schema = WithJsonSchema({"type": "array", "items": row, "minItems": 1})

    async def predict(self: Any, rows: Annotated[list[dict[str, Any]], schema]) -> dict[str, Any]:
        """Predict rows: for each its label or value, with uncertainty and OOD score."""
        return await _answer(Payload(columns.kind, (json.dumps({"rows": rows}).encode(),)))

    return bentoml.api(predict)


@bentoml.service(
    name="slipway",
    service_class=WrappedService,
    workers=SETTINGS.workers,
    http={"host": "127.0.0.1", "port": 3000},
    # The application has its own metrics and logs; BentoML's cost a millisecond per request.
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
    traffic={"timeout": SETTINGS.request_timeout_s},
)
class Slipway:
    """Predicts the label or value of an image, a table row or a text."""

    @bentoml.on_deployment  # type: ignore[untyped-decorator]
    @staticmethod
    def prepare() -> None:
        """Prepare the server process, before any worker starts. Errors become one line."""
        from slipway.runtimes.onnx_runtime import refuse_two_runtimes
        from slipway.serving.process.addresses import require_safe_start
        from slipway.serving.process.supervisor import supervise

        try:
            refuse_two_runtimes()
        except SlipwayError as error:
            raise BentoMLConfigException(str(error)) from None
        supervise()
        open_server_directory(Path(BentoMLContainer.bentoml_home.get()) / "slipway_metrics")
        context = click.get_current_context(silent=True)
        if context is None:
            return
        if context.params.get("timeout_keep_alive"):
            raise BentoMLConfigException(
                "--timeout-keep-alive has no effect here; set SLIPWAY_IDLE_TIMEOUT_S"
            )
        host = context.params.get("host") or BentoMLContainer.http.host.get()
        port = context.params.get("port") or BentoMLContainer.http.port.get()
        try:
            require_safe_start(SETTINGS, EXTENSIONS, host, port)
        except SlipwayError as error:
            raise BentoMLConfigException(str(error)) from None

    @bentoml.on_startup  # type: ignore[untyped-decorator]
    async def start(self) -> None:
        """Start to load the model in the background."""
        from slipway.serving.process.worker_process import set_up_worker_process

        set_up_worker_process(worker())
        worker().start()
        if _operator_port:
            await _operator_port.open()
        if SETTINGS.workers > 1:
            # Workers share a socket: a worker that is still loading must not take connections
            # that another one could answer.
            await worker().loaded()

    @bentoml.on_shutdown  # type: ignore[untyped-decorator]
    async def stop(self) -> None:
        """Finish queued requests."""
        await worker().stop()
        if _operator_port:
            await _operator_port.close()

    async def __is_ready__(self) -> bool:
        return worker().model is not None and not worker().is_draining

    predict = _method_of_rows(COLUMNS) if COLUMNS else _method_of_images()
