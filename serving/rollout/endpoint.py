"""`GET /rollout`: what is rolled out. `POST /rollout`: what `python -m serving.rollout` does, as JSON, for operators."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from serving.api_docs.schemas import ANYTHING
from serving.http.responses import Refusal, Response, json_response
from serving.http.routes import READING, Operation, Request, Route, Routes, always
from serving.http.strict_json import may_exceed, parse
from serving.requests.reading import read_json
from serving.rollout import commands
from serving.rollout.reconciler import RolloutReconciler
from serving.rollout.state import Allowed, Mode, RolloutPlan
from serving.settings import ROOT, Settings
from slipway.system.contract import Contract
from slipway.system.errors import LockedError, SlipwayError

_MAX_BYTES = 64 << 10
_MAX_VALUES = 200
_PROPOSING = get_args(Mode)
_ORDERS = ("promote", "abort", "rollback", "reset")
_ACCEPTED = 'send {"command": ...} with content type application/json; see docs/rollout.md'

_OPERATION = Operation(
    "What is rolled out; sent as JSON, what is to be.",
    takes={
        "application/json": ANYTHING
        | {
            "required": ["command"],
            "properties": {"command": {"type": "string", "enum": [*_PROPOSING, *_ORDERS]}},
        }
    },
    answers={"application/json": ANYTHING},
    errors=(
        "rollout_invalid",
        "rollout_refused",
        "malformed_json",
        "unsupported_media_type",
        "body_too_large",
    ),
    example="""-H 'content-type: application/json' -d '{"command": "abort"}'""",
)


def _without_nul(path: Path) -> Path:
    if "\0" in str(path):
        raise PydanticCustomError("path", "no path holds a NUL character")
    return path


ServerPath = Annotated[Path, AfterValidator(_without_nul)]


class Proposal(Contract):
    """A model to deploy, shadow or try. Paths are the server's own; a relative one starts at the folder that holds `serving/`."""

    command: Mode
    bundle: ServerPath
    certificate: ServerPath | None = None
    engine: ServerPath | None = None
    allowed: Allowed = Allowed()
    plan: RolloutPlan = RolloutPlan()


class Order(Contract):
    """An end of a candidate, or a return of the stable model."""

    command: Literal["promote", "abort", "reset"]


class Rollback(Contract):
    """A return from the model of that version."""

    command: Literal["rollback"]
    version: Annotated[str, Field(max_length=64)] | None = None


class _Orders:
    """Carries out one order at a time on a thread of its own, as it may take minutes: asyncio's few threads are everybody's."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipway-rollout")
        self._last: Future[None] | None = None

    async def carry_out(self, wanted: Proposal | Order | Rollback) -> None:
        """SlipwayError or OSError with the reason if it is refused; LockedError at once while another one is carried out."""
        if self._last is not None and not self._last.done():
            raise LockedError(
                "this worker is carrying out another order; GET says what came of it. Wait for it, then try again."
            )
        self._last = self._thread.submit(_order, self._settings, wanted)
        await asyncio.wrap_future(self._last)


def rollout_routes(settings: Settings, reconciler: RolloutReconciler) -> Routes:
    """`/rollout`."""
    orders = _Orders(settings)

    async def rollout(request: Request) -> Response:
        if request.method in READING:
            return json_response(await asyncio.to_thread(reconciler.status))
        wanted = _wanted(await read_json(request, _MAX_BYTES, _ACCEPTED))
        try:
            await orders.carry_out(wanted)
        except (SlipwayError, OSError) as error:
            raise Refusal("rollout_refused", str(error)) from None
        # Workers prepare now; GET says when they are done.
        return json_response(await asyncio.to_thread(reconciler.status), 202)

    return {"/rollout": Route((*READING, "POST"), rollout, "operator", always(_OPERATION))}


def _wanted(body: bytes) -> Proposal | Order | Rollback:
    if may_exceed(body, _MAX_VALUES):
        raise Refusal(
            "rollout_invalid",
            f"the JSON holds more than {_MAX_VALUES} values; see docs/rollout.md for what is expected",
        )
    content: Any = parse(body)
    command = content.get("command") if isinstance(content, dict) else None
    wanted: type[Proposal | Order | Rollback] = (
        Proposal if command in _PROPOSING else Rollback if command == "rollback" else Order
    )
    if command not in (*_PROPOSING, *_ORDERS):
        known = ", ".join((*_PROPOSING, *_ORDERS))
        raise Refusal(
            "rollout_invalid",
            f'expected {{"command": ...}} with one of {known}; see docs/rollout.md',
            field="command",
        )
    try:
        return wanted.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refusal(
            "rollout_invalid",
            f"{where}: {first['msg']}; see docs/rollout.md for what {command} takes",
            field=where,
        ) from None


def _order(settings: Settings, wanted: Proposal | Order | Rollback) -> None:
    if isinstance(wanted, Order):
        {"promote": commands.promote, "abort": commands.abort, "reset": commands.reset}[
            wanted.command
        ](settings)
        return
    if isinstance(wanted, Rollback):
        commands.rollback(settings, wanted.version)
        return
    paths = {
        name: ROOT / path
        for name in ("certificate", "engine")
        if (path := getattr(wanted, name)) is not None
    }
    commands.propose(
        settings,
        wanted.command,
        ROOT / wanted.bundle,
        allowed=wanted.allowed,
        plan=wanted.plan,
        **paths,
    )
