"""An engine for this machine, built by a process of its own while the service answers with what it has.

That process ends with the worker and runs at low priority; nothing of TensorRT's builder is ever loaded into the worker. What it says when it fails,
or how it was ended, is the reason that `/model` and the log give.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from serving.models.model import ServedModel
from serving.settings import ROOT, Settings
from slipway.artifacts.certificate import why_uncertified
from slipway.artifacts.engine_manifest import read_request
from slipway.runtimes import rebuild, runtime
from slipway.system.errors import EngineError, SlipwayError

COMMAND = (sys.executable, "-m", rebuild.__name__)
_LAST_WORDS = 2000  # characters


@dataclass(frozen=True)
class RebuildState:
    """Whether an engine is built here, and why, or why not."""

    status: Literal["not_asked_for", "not_needed", "impossible", "building", "failed", "swapped"]
    reason: str


def first_state(settings: Settings, model: ServedModel | None) -> RebuildState:
    """`building` if an engine was asked for, is not what runs, and can be built here."""
    if not settings.rebuild_engine:
        return RebuildState("not_asked_for", "SLIPWAY_REBUILD_ENGINE is false")
    if settings.provider not in ("auto", "tensorrt"):
        return RebuildState("not_needed", f"SLIPWAY_PROVIDER is {settings.provider}")
    if model and model.selection.actual.backend == "tensorrt":
        return RebuildState("not_needed", "a certified engine runs")
    reason = runtime.why_unavailable("tensorrt") or _why_not_to_be_served(settings, model)
    if reason:
        return RebuildState("impossible", reason)
    return RebuildState("building", f"into {settings.rebuilt_engine}")


def _why_not_to_be_served(settings: Settings, model: ServedModel | None) -> str | None:
    try:
        requested = read_request(settings.engine).requested
    except SlipwayError:  # the rebuild says so itself
        return None
    return why_uncertified(model.certificate, requested) if model else None


async def build(settings: Settings, command: Sequence[str] = COMMAND) -> None:
    """Run the process to its end. EngineError with its last words if it failed, or with the signal that ended it."""
    guarded = (sys.executable, "-m", "slipway.system.parent_death", str(os.getpid()), *command)
    paths = map(str, (settings.bundle, settings.engine, settings.rebuilt_engine))
    process = await asyncio.create_subprocess_exec(
        *guarded,
        *paths,
        cwd=ROOT,  # where Python finds the library, wherever the service was started
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, words = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode:
        last = words.decode(errors="replace").strip()[-_LAST_WORDS:]
        raise EngineError(
            f"the rebuild {_how_it_ended(process.returncode)}: {last or 'it said nothing'}"
        )


def _how_it_ended(exit_code: int) -> str:
    return (
        f"was ended by {signal.Signals(-exit_code).name}"
        if exit_code < 0
        else f"ended with exit code {exit_code}"
    )
