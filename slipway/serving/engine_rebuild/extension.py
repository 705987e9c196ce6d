"""Builds a TensorRT engine for this machine in the background, while the service predicts.

A process of low priority builds the engine and ends with the worker, so the worker never loads
TensorRT's builder. If it fails, its last output, or the signal that ended it, is the reason in `GET
/model` and in the log.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slipway.artifacts.certificate import why_uncertified
from slipway.artifacts.engine_manifest import read_request
from slipway.runtimes import rebuild, runtime
from slipway.serving.extension import Extension, Hooks
from slipway.serving.models.loader import load_model
from slipway.serving.models.model import ServedModel
from slipway.serving.settings import ROOT, Settings, SettingsSection
from slipway.serving.worker import ModelWorker
from slipway.system.errors import EngineError, SlipwayError

logger = logging.getLogger("bentoml.slipway")

COMMAND = (sys.executable, "-m", rebuild.__name__)
_MAX_OUTPUT = 2000  # characters of the output that are kept


class RebuildSettings(SettingsSection):
    """Settings for rebuilding an engine that was built on another machine."""

    rebuild_engine: bool = False


@dataclass(frozen=True)
class RebuildState:
    """State of the rebuild, and the reason if it failed or was not started."""

    status: Literal["not_requested", "not_needed", "impossible", "building", "failed", "swapped"]
    reason: str


def first_state(settings: Settings, model: ServedModel | None) -> RebuildState:
    """Return `building` if an engine is requested, not in use yet, and can be built here."""
    if not settings.section(RebuildSettings).rebuild_engine:
        return RebuildState("not_requested", "SLIPWAY_REBUILD_ENGINE is false")
    if settings.provider not in ("auto", "tensorrt"):
        return RebuildState("not_needed", f"SLIPWAY_PROVIDER is {settings.provider}")
    if model and model.selection.actual.backend == "tensorrt":
        return RebuildState("not_needed", "a certified engine runs")
    reason = runtime.why_unavailable("tensorrt") or _why_not_servable(settings, model)
    if reason:
        return RebuildState("impossible", reason)
    return RebuildState("building", f"into {settings.rebuilt_engine}")


def _why_not_servable(settings: Settings, model: ServedModel | None) -> str | None:
    try:
        requested = read_request(settings.engine).requested
    except SlipwayError:  # the rebuild reports it
        return None
    return why_uncertified(model.certificate, requested) if model else None


async def build(settings: Settings, command: Sequence[str] = COMMAND) -> None:
    """Run the build. Raises EngineError with its last output, or the signal that ended it."""
    guarded = (sys.executable, "-m", "slipway.system.parent_death", str(os.getpid()), *command)
    paths = map(str, (settings.bundle, settings.engine, settings.rebuilt_engine))
    process = await asyncio.create_subprocess_exec(
        *guarded,
        *paths,
        cwd=ROOT,  # so that Python finds Slipway
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, output = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode:
        last = output.decode(errors="replace").strip()[-_MAX_OUTPUT:]
        raise EngineError(f"the rebuild {_ending(process.returncode)}: {last or 'no output'}")


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


class EngineRebuild:
    """One worker's rebuild. `command` starts the process that builds."""

    def __init__(self, worker: ModelWorker, command: Sequence[str] = COMMAND) -> None:
        self._worker = worker
        self._command = command
        self._task: asyncio.Task[None] | None = None
        self.state = RebuildState("not_requested", "the model is being loaded")

    def start(self) -> None:
        """Schedule the rebuild, if an engine is needed, for the time after the model is loaded."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task:
            self._task.cancel()
            await self.ended()

    async def ended(self) -> None:
        """Wait until the rebuild has finished. Returns at once if none was started."""
        if self._task:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def model_info(self) -> dict[str, Any]:
        return {"rebuild": {"status": self.state.status, "reason": self.state.reason}}

    async def _run(self) -> None:
        await self._worker.loaded()
        self.state = first_state(self._worker.settings, self._worker.model)
        if self.state.status == "impossible":
            logger.error("cannot build an engine for this machine: %s", self.state.reason)
        if self.state.status == "building":
            logger.info("building an engine for this machine %s", self.state.reason)
            await self.rebuild()

    async def rebuild(self) -> None:
        """Build an engine, load it and replace the model.

        On any failure the current model stays.
        """
        try:
            settings = self._worker.model_settings
            await build(settings, self._command)
            self._require_unchanged(settings)
            model = await asyncio.to_thread(load_model, settings)
            self._require_unchanged(settings)  # a promotion must not be undone
            if model.selection.actual.backend != "tensorrt":
                raise EngineError("; ".join(model.selection.passed_over))
            await self._worker.swap(model)
        except SlipwayError as error:
            self.state = RebuildState("failed", str(error))
            logger.error("cannot serve the rebuilt engine (%s); keeping the current model", error)
        except Exception as error:
            self.state = RebuildState("failed", f"{type(error).__name__}: {error}")
            logger.exception("cannot serve the rebuilt engine; keeping the current model")
        else:
            self.state = RebuildState(
                "swapped", f"the engine in {settings.rebuilt_engine} is served"
            )

    def _require_unchanged(self, settings: Settings) -> None:
        if settings != self._worker.model_settings:
            message = (
                "another model was rolled out meanwhile; its engine is built at the next start"
            )
            raise EngineError(message)


def attach(worker: ModelWorker, command: Sequence[str] = COMMAND) -> Hooks:
    rebuild = EngineRebuild(worker, command)
    return Hooks(model_info=rebuild.model_info, start=rebuild.start, stop=rebuild.stop)


EXTENSION = Extension("engine_rebuild", attach, RebuildSettings)
