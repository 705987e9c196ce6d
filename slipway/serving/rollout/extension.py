"""Adds rollouts to the service: swaps models, routes canary traffic, and serves `/rollout`.

`GET /rollout` returns the status; `POST /rollout` runs the commands of a rollout.
"""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from slipway.serving.extension import Extension, Hooks
from slipway.serving.http.responses import Refusal, Response, json_response
from slipway.serving.http.routes import READING, Operation, Request, Route, Routes, always
from slipway.serving.http.strict_json import may_exceed, parse
from slipway.serving.requests.bodies import BODY_ERRORS, read_json
from slipway.serving.rollout import commands
from slipway.serving.rollout.history import Author
from slipway.serving.rollout.reconciler import RolloutReconciler, sync_at_start
from slipway.serving.rollout.settings import RolloutSettings
from slipway.serving.rollout.state import Allowed, Mode, RolloutPlan, read_rollout
from slipway.serving.rollout.store import settings_of
from slipway.serving.schemas import ANYTHING, schema_of
from slipway.serving.settings import ROOT, Settings
from slipway.serving.worker import ModelWorker
from slipway.system.contract import Contract
from slipway.system.errors import LockedError, SlipwayError

_MAX_BYTES = 64 << 10
_MAX_VALUES = 200
_ACCEPTED = 'send {"command": ...} with content type application/json; see docs/how-to/rollout.md'


def _without_nul(path: Path) -> Path:
    if "\0" in str(path):
        raise PydanticCustomError("path", "no path holds a NUL character")
    return path


ServerPath = Annotated[
    Path,
    AfterValidator(_without_nul),
    WithJsonSchema({"type": "string", "pattern": "^[^\\u0000]*$"}),
]


Reason = Annotated[str, Field(max_length=500)]  # reason for the history


class Proposal(Contract):
    """A model to roll out. Paths are the server's; relative ones start at ROOT."""

    command: Mode
    bundle: ServerPath
    certificate: ServerPath | None = None
    engine: ServerPath | None = None
    allowed: Allowed = Allowed()
    plan: RolloutPlan = RolloutPlan()
    reason: Reason = ""


class Order(Contract):
    """The body of a command that has no arguments."""

    command: Literal["promote", "abort", "reset"]
    reason: Reason = ""


class Rollback(Contract):
    """The command `rollback`, with the version to stop serving."""

    command: Literal["rollback"]
    version: Annotated[str, Field(max_length=64)] | None = None
    reason: Reason = ""


_TYPES: dict[str, type[Proposal | Order | Rollback]] = {
    **dict.fromkeys(get_args(Mode), Proposal),
    "promote": Order,
    "abort": Order,
    "rollback": Rollback,
    "reset": Order,
}
_OPERATION = Operation(
    "The rollout; sent as JSON, a command that changes it.",
    takes={
        "application/json": schema_of(Proposal | Order | Rollback),
    },
    answers={"application/json": ANYTHING},
    errors=(*BODY_ERRORS, "rollout_invalid", "rollout_refused", "malformed_json"),
    example="""-H 'content-type: application/json' -d '{"command": "abort"}'""",
    statuses=(202,),
)


class _CommandThread:
    """Runs one command at a time on its own thread, because it may take minutes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipway-rollout")
        self._last: Future[None] | None = None

    async def run(self, command: Proposal | Order | Rollback, caller: str | None) -> None:
        """Run a command on the thread.

        Raises SlipwayError or OSError; LockedError if one is running.
        """
        if self._last is not None and not self._last.done():
            raise LockedError(
                "this worker is still running another command. "
                "Wait until GET /rollout shows its result, then try again."
            )
        self._last = self._thread.submit(_run, self._settings, command, caller)
        await asyncio.wrap_future(self._last)


def rollout_routes(settings: Settings, reconciler: RolloutReconciler) -> Routes:
    """Return the route `/rollout`: GET returns the status, POST runs a command."""
    thread = _CommandThread(settings)

    async def rollout(request: Request) -> Response:
        if request.method in READING:
            return json_response(await asyncio.to_thread(reconciler.status))
        command = _parse(await read_json(request, _MAX_BYTES, _ACCEPTED))
        try:
            await thread.run(command, request.caller)
        except (SlipwayError, OSError) as error:
            raise Refusal("rollout_refused", str(error)) from None
        # 202: the workers prepare now, and GET shows their progress.
        return json_response(await asyncio.to_thread(reconciler.status), 202)

    return {"/rollout": Route((*READING, "POST"), rollout, "operator", always(_OPERATION))}


def _parse(body: bytes) -> Proposal | Order | Rollback:
    if may_exceed(body, _MAX_VALUES):
        raise Refusal(
            "rollout_invalid",
            f"the JSON holds over {_MAX_VALUES} values; docs/how-to/rollout.md has the format",
        )
    content: Any = parse(body)
    command = content.get("command") if isinstance(content, dict) else None
    if not isinstance(command, str) or command not in _TYPES:
        raise Refusal(
            "rollout_invalid",
            f'expected {{"command": ...}} with one of {", ".join(_TYPES)}; '
            "see docs/how-to/rollout.md",
            field="command",
        )
    try:
        return _TYPES[command].model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise Refusal(
            "rollout_invalid",
            f"{field}: {first['msg']}; see docs/how-to/rollout.md for the fields of {command}",
            field=field,
        ) from None


def _run(settings: Settings, command: Proposal | Order | Rollback, caller: str | None) -> None:
    author = Author(f"the key of {caller}" if caller else "HTTP without a key", command.reason)
    if isinstance(command, Order):
        commands.BY_NAME[command.command](settings, author)
    elif isinstance(command, Rollback):
        commands.rollback(settings, command.version, author=author)
    else:
        commands.propose(
            settings,
            command.command,
            ROOT / command.bundle,
            certificate=command.certificate and ROOT / command.certificate,
            engine=command.engine and ROOT / command.engine,
            allowed=command.allowed,
            plan=command.plan,
            author=author,
        )


def _attach(worker: ModelWorker) -> Hooks:
    reconciler = RolloutReconciler(worker)
    return Hooks(
        routes=rollout_routes(worker.settings, reconciler),
        select_model=reconciler.initial_settings,
        on_wrong_answer=reconciler.note_wrong,
        model_info=lambda: {"rolled_out": reconciler.model_info()},
        status={"rollout": reconciler.status},
        start=reconciler.start,
        stop=reconciler.stop,
    )


def initial_settings(settings: Settings) -> Settings:
    """Return the settings with the rolled-out model, if there is one, in place of SLIPWAY_BUNDLE.

    Raises SlipwayError if the state is invalid.
    """
    if settings.accept_draft:  # RolloutReconciler.initial_settings does the same
        return settings
    sync_at_start(settings.state)
    return settings_of(settings, read_rollout(settings.state).stable)


EXTENSION = Extension("rollout", _attach, RolloutSettings, initial_settings=initial_settings)
