"""Loads a candidate in one worker, and sends it requests or copies of requests.

Loading happens at low priority. A candidate is refused, with the reason, if it cannot be loaded, or
if its inputs, outputs or metrics forbid that it replaces the stable model.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipway.predictor.loader import read_certified
from slipway.serving.models.live_model import LiveModel
from slipway.serving.models.loader import load_model
from slipway.serving.models.model import ServedModel
from slipway.serving.rollout.candidate.canary import Canary, SeenIds
from slipway.serving.rollout.candidate.shadow import Shadow, lower_priority
from slipway.serving.rollout.comparison import explained_disagreement, require_successor
from slipway.serving.rollout.evidence import Evidence
from slipway.serving.rollout.metrics import RolloutMetrics
from slipway.serving.rollout.reports import Phase, seen_ids_path
from slipway.serving.rollout.settings import RolloutSettings
from slipway.serving.rollout.state import Candidate
from slipway.serving.rollout.store import settings_of
from slipway.serving.worker import ModelWorker
from slipway.system.errors import SlipwayError
from slipway.system.malloc import return_memory_to_os

logger = logging.getLogger("bentoml.slipway")


class Trial:
    """The candidate in this worker: its phase, its model and its evidence."""

    def __init__(
        self, candidate: Candidate, worker: ModelWorker, metrics: RolloutMetrics, state: Path
    ) -> None:
        self.candidate = candidate
        self.phase: Phase = "preparing"
        self.reason = ""
        self.disagreement = 1.0
        self.live: LiveModel | None = None
        self.shadow: Shadow | None = None
        self.evidence = Evidence()
        self._worker = worker
        self._metrics = metrics
        self._state_folder = state
        self._canary: Canary | None = None
        self._seen_ids: SeenIds | None = None  # request ids that a canary has seen

    async def prepare(self) -> None:
        """Load the model, and route requests to it; a failure sets the phase "refused"."""
        candidate = self.candidate
        try:
            model = await self._load()
            stable = self._worker.model
            if stable and not candidate.returns:
                require_successor(model.bundle.manifest, stable.bundle.manifest, candidate.allowed)
            if candidate.allowed.disagreement:
                self.disagreement = candidate.allowed.disagreement
            elif stable:
                self.disagreement = explained_disagreement(
                    model.bundle.manifest, stable.bundle.manifest
                )
            if candidate.mode == "canary":
                path = seen_ids_path(self._state_folder, candidate.id)
                self._seen_ids = await asyncio.to_thread(SeenIds, path, candidate.salt)
            self.live = self._worker.make_live(model, "candidate")
        except SlipwayError as error:
            self.phase, self.reason = "refused", str(error)
        except Exception as error:
            self.phase, self.reason = "refused", f"{type(error).__name__}: {error}"
            logger.exception("rollout: cannot load candidate %s; refusing it", candidate.name)
        else:
            self.phase = "prepared"
            self.route(candidate)

    async def _load(self) -> ServedModel:
        settings = settings_of(self._worker.settings, self.candidate.model)
        is_shadow = self.candidate.mode == "shadow"
        if is_shadow:
            # With one thread ONNX Runtime computes on the calling thread, which has low priority.
            settings = settings.model_copy(update={"num_threads": 1})
        executor = ThreadPoolExecutor(
            1, thread_name_prefix="slipway-rollout", initializer=lower_priority
        )
        try:
            certified = await asyncio.get_running_loop().run_in_executor(
                executor,
                lambda: read_certified(
                    settings.bundle,
                    settings.certificate,
                    accept_draft=False,
                    accept_missed_gates=is_shadow,
                ),
            )
        finally:
            executor.shutdown(wait=False)
        # At normal priority, which the threads of ONNX Runtime inherit from their creator.
        return await asyncio.to_thread(load_model, settings, certified)

    def route(self, candidate: Candidate) -> None:
        """Route requests (canary) or copies of requests (shadow) by the candidate's fraction."""
        self.candidate = candidate
        if candidate.phase != "running" or self.live is None:
            return
        fraction = self._worker.settings.section(RolloutSettings).shadow_fraction
        if self.shadow is None and fraction:
            self.shadow = Shadow(
                self.live,
                fraction,
                candidate.salt,
                candidate.allowed.difference,
                self.evidence,
                self._metrics.shadowed,
            )
            self._worker.observers.add(self.shadow)
        if self._seen_ids:
            canary = self._canary or Canary(
                self.live, self.evidence, candidate.salt, self._seen_ids
            )
            canary.fraction, canary.slow_s = candidate.fraction, candidate.slow_s
            self._set_canary(canary)

    def stop_routing(self) -> None:
        """Send the candidate no more requests."""
        self._set_canary(None)

    def _set_canary(self, canary: Canary | None) -> None:
        """Route by `canary`; the gauge of its fraction never differs from what is routed."""
        self._canary = self._worker.router = canary
        self._metrics.candidate_fraction.set(canary.fraction if canary else 0)

    async def close(self) -> None:
        """Send the candidate no more requests, wait for those in flight, and free it."""
        self.stop_routing()
        if self.shadow:
            self._worker.observers.remove(self.shadow)
            await asyncio.to_thread(self.shadow.close)
        if live := self.take_live():
            await live.retire()
            del live
            await asyncio.to_thread(return_memory_to_os)

    def take_live(self) -> LiveModel | None:
        """Return the loaded model, which then belongs to the caller."""
        live, self.live = self.live, None
        return live

    def note_wrong(self, model_version: str) -> None:
        """Count a wrong prediction of `model_version`, shown by feedback. Any thread may call it.

        Feedback counts with the candidate's current fraction, not with that at the time of the
        request. The current fraction is at least as large, which favours the candidate.
        """
        live, canary, stable = self.live, self._canary, self._worker.model
        if live is None or canary is None or stable is None:
            return
        if canary.fraction and model_version in (live.model.version, stable.version):
            is_candidate = model_version != stable.version
            self.evidence.event("quality", canary.fraction, of_candidate=is_candidate)
