"""A worker follows the state: four times a second it looks whether it changed, loads, swaps, lets a share of the requests go, and reports.

All of it happens beside the request path, and whatever goes wrong with it, the model that is served goes on. The first worker that sees
that a candidate has to go up, back or to its place writes that down for all.
"""

import asyncio
import logging
import os
import threading
import time
from typing import Annotated

from prometheus_client import Counter, Gauge
from pydantic import Field

from serving.metrics.service_metrics import ServiceMetrics
from serving.models.live_model import LiveModel
from serving.models.loading import load_model, read_certified
from serving.models.model import ServedModel
from serving.rollout.canary import Canary
from serving.rollout.comparing import explained_disagreement, require_successor
from serving.rollout.deciding import decide
from serving.rollout.evidence import SHADOWED, Evidence
from serving.rollout.first_uses import FirstUses
from serving.rollout.low_priority import at_low_priority
from serving.rollout.reports import (
    Phase,
    Report,
    first_uses_path,
    forget_reports,
    process_started,
    read_reports,
    write_report,
)
from serving.rollout.shadowing import Shadow
from serving.rollout.state import (
    EMPTY,
    FILE,
    OUTCOMES,
    Candidate,
    Model,
    Rollout,
    change_rollout,
    name_of,
    read_rollout,
)
from serving.rollout.status import describe
from serving.rollout.store import prune_unless_commanding, settings_of
from serving.settings import Settings, SettingsSection
from serving.worker import ModelWorker
from slipway.system.errors import SlipwayError
from slipway.system.malloc import give_back_freed_memory

logger = logging.getLogger("bentoml.slipway")

POLL_S = 0.25
_REPORT_S = 1.0  # between two reports that differ in counts alone


class RolloutSettings(SettingsSection):
    """The steps by which a candidate is tried."""

    shadow_share: Annotated[float, Field(ge=0, le=1)] = (
        0.1  # of the requests that a candidate answers copies of
    )


class RolloutMetrics:
    """Counts rollouts and shadowed requests, and shows a canary's share."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        registry = metrics.registry
        metrics.add_slots("candidate", "shadow")
        metrics.add_fault_parts("rollout")
        self._metrics = metrics
        swaps = Counter(
            "slipway_swaps",
            "What became of models that were rolled out.",
            ["outcome"],
            registry=registry,
        )
        shadowed = Counter(
            "slipway_shadow",
            "Copies of requests, by how the candidate answered them.",
            ["outcome"],
            registry=registry,
        )
        self._swaps = {outcome: swaps.labels(outcome) for outcome in OUTCOMES}
        self._shadowed = {outcome: shadowed.labels(outcome) for outcome in SHADOWED}
        self._share = Gauge(
            "slipway_candidate_share",
            "Share of the requests that a canary answers.",
            multiprocess_mode="livemax",
            registry=registry,
        )

    def swap(self, outcome: str) -> None:
        """Count what became of a candidate. The first worker that sees it does."""
        self._swaps[outcome].inc()

    def shadowed(self, outcome: str) -> None:
        """Count a copy of a request. Any thread may call it."""
        self._shadowed[outcome].inc()
        if outcome in ("agrees", "differs"):
            self._metrics.answer("shadow")

    def candidate_share(self, share: float) -> None:
        """Set the share of the requests that a canary answers; 0 if there is none."""
        self._share.set(share)

    def fault(self) -> None:
        """Count a reconciliation that failed."""
        self._metrics.fault("rollout")


class _Trial:
    """The candidate in this worker."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.phase: Phase = "preparing"
        self.reason = ""
        self.disagreement = 1.0
        self.live: LiveModel | None = None
        self.shadow: Shadow | None = None
        self.first_uses: FirstUses | None = None  # of a canary
        self.evidence = Evidence()


class RolloutReconciler:
    """Brings one worker to the desired rollout state."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self._metrics = RolloutMetrics(worker.metrics)
        self._settings = worker.settings
        self._state_folder = worker.settings.state
        self._shadow_share = worker.settings.section(RolloutSettings).shadow_share
        self._canary: Canary | None = None
        self._rollout = EMPTY
        self._stamp: tuple[int, int] | None = None
        self._stable: Model | None = None  # that is served
        self._begun_revision = -1  # that the first load followed; -1: the state could not be read
        self._problem = ""
        self._tried_revision = -1  # with which the stable model was last loaded in vain
        self._trial: _Trial | None = None
        self._reported: Report | None = None
        self._reported_at = 0.0
        self._writing = threading.Lock()
        self._is_stopped = False
        self.num_reports = 0  # that were written
        self._failing = ""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> Settings:
        """Settings for the model to start with, SLIPWAY_BUNDLE's or the one that was rolled out. SlipwayError if that is not there."""
        if (
            self._settings.accept_draft
        ):  # the verify stage asks about SLIPWAY_BUNDLE, whatever is rolled out beside it
            return self._settings
        self._rollout = read_rollout(self._state_folder)
        self._stable, self._begun_revision = self._rollout.stable, self._rollout.revision
        if self._stable:
            logger.info(
                "%s says that %s is served, not SLIPWAY_BUNDLE",
                self._state_folder / FILE,
                self._stable.version,
            )
        return settings_of(self._settings, self._stable)

    @property
    def is_shadowing(self) -> bool:
        """Whether a candidate answers copies of requests in this worker."""
        return self._trial is not None and self._trial.shadow is not None

    def model_info(self) -> dict[str, object]:
        """What `/model` says of it: which model was rolled out, and that it is served in place of SLIPWAY_BUNDLE."""
        wins_over = str(self._settings.bundle) if self._stable else None
        return {
            "stable": name_of(self._stable),
            "wins_over": wins_over,
            "candidate": self._trial.candidate.name if self._trial else None,
        }

    def start(self) -> None:
        """Follow from now on."""
        if not self._settings.accept_draft:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Follow no longer; the candidate ends, and the last report says that this was in order."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        report = self._report(stopped=True)
        await self._drop()
        if self._task and self._reported:
            try:
                await asyncio.to_thread(self._write, report)
            except OSError as error:
                logger.error(
                    "the rollout in %s does not know that this worker ends: %s",
                    self._state_folder,
                    error,
                )

    def note_wrong(self, model_version: str) -> None:
        """Evidence by feedback: an answer of that model was wrong. Any thread may call it.

        Late feedback is judged by today's share, which is no smaller than at the request: that favours the candidate.
        """
        trial, canary, stable = self._trial, self._canary, self._worker.model
        if (
            trial is None
            or trial.live is None
            or canary is None
            or stable is None
            or not canary.share
        ):
            return
        if model_version in (trial.live.model.version, stable.version):
            trial.evidence.event(
                "quality", canary.share, of_candidate=model_version != stable.version
            )

    def status(self) -> dict[str, object]:
        """What is rolled out, for the page and `GET /rollout`; reads files, so it belongs on a thread."""
        return describe(read_rollout(self._state_folder), read_reports(self._state_folder))

    async def reconcile(self) -> None:
        """Look once, and do what has to be done."""
        if self._look():
            try:
                self._rollout = await asyncio.to_thread(read_rollout, self._state_folder)
            except SlipwayError:
                self._stamp = None  # read again
                raise
        if not self.num_reports:
            rollout = self._rollout
            await asyncio.to_thread(
                forget_reports,
                self._state_folder,
                rollout.candidate.id if rollout.candidate else None,
            )
        # Before a candidate is touched: it may have ended the process that was here before.
        await self._decide()
        await self._follow_stable()
        await self._follow_candidate()
        await asyncio.to_thread(self._tell)

    async def _run(self) -> None:
        await self._worker.loaded()
        while True:
            try:
                await self.reconcile()
                self._failing = ""
            except (
                Exception
            ) as error:  # a full disk, a state that somebody wrote by hand: the model serves on
                self._metrics.fault()
                if str(error) != self._failing:
                    self._failing = str(error)
                    is_ours = not isinstance(error, SlipwayError | OSError)
                    reason = f"{type(error).__name__}: {error}"  # with its path, which the repr of an OSError lacks
                    logger.error(
                        "the rollout in %s is not followed: %s",
                        self._state_folder,
                        reason,
                        exc_info=is_ours,
                    )
            await asyncio.sleep(POLL_S)

    def _look(self) -> bool:
        """Whether the file is another than at the last look."""
        try:
            status = (self._state_folder / FILE).stat()
            stamp = (status.st_mtime_ns, status.st_ino)
        except (FileNotFoundError, NotADirectoryError):
            stamp = (0, 0)
        changed, self._stamp = stamp != self._stamp, stamp
        return changed

    async def _decide(self) -> None:
        rollout = self._rollout
        if rollout.candidate is None and rollout.num_told == rollout.num_events:
            return
        reports = await asyncio.to_thread(read_reports, self._state_folder)
        if (
            decide(rollout, reports, time.time()) != rollout
            or rollout.num_told < rollout.num_events
        ):
            self._rollout = await asyncio.to_thread(self._write_decision)

    def _write_decision(self) -> Rollout:
        reports = read_reports(self._state_folder)
        untold: list[int] = []

        def change(rollout: Rollout) -> Rollout:
            after = decide(rollout, reports, time.time())
            untold.extend(event.number for event in after.events if event.number > after.num_told)
            return after.changed(num_told=after.num_events)

        after = change_rollout(self._state_folder, change)
        for event in after.events:
            if event.number in untold:
                self._count_and_log(event.what, event.model, event.reason)
        forget_reports(self._state_folder, after.candidate.id if after.candidate else None)
        if after.candidate is None:
            prune_unless_commanding(self._state_folder)
        return after

    def _count_and_log(self, what: str, model: str, reason: str) -> None:
        if what in OUTCOMES:
            self._metrics.swap(what)
        level = logging.ERROR if what in ("refused", "rolled_back") else logging.INFO
        logger.log(level, "rollout: model %s %s: %s", model, what.replace("_", " "), reason)

    async def _follow_stable(self) -> None:
        wanted, revision = self._rollout.stable, self._rollout.revision
        if wanted == self._stable and (
            self._worker.model is not None or revision == self._begun_revision
        ):
            return
        if revision == self._tried_revision:
            return  # it was refused, or cannot be loaded: only another state changes that
        trial = self._trial
        try:
            if (
                trial
                and trial.live
                and trial.candidate.mode != "shadow"
                and trial.candidate.model == wanted
            ):
                live = trial.live
                trial.live = None  # it is no candidate any more
            else:
                live = self._worker.make_live(
                    await asyncio.to_thread(load_model, settings_of(self._settings, wanted)),
                    "stable",
                )
        except Exception as error:
            self._tried_revision = revision
            self._problem = f"{name_of(wanted)} cannot be served: {error}"
            logger.error("rollout: %s; model %s serves on", self._problem, name_of(self._stable))
            return
        self._stable, self._problem = wanted, ""
        self._route_to(None)
        await self._worker.take_over(live)
        del live
        await asyncio.to_thread(give_back_freed_memory)

    async def _follow_candidate(self) -> None:
        candidate, trial = self._rollout.candidate, self._trial
        if trial and (candidate is None or trial.candidate.id != candidate.id):
            await self._drop()
            trial = None
        if candidate is None:
            return
        if trial is None:
            await self._prepare(candidate)
        elif trial.phase == "prepared":
            self._let_go(trial, candidate)

    async def _prepare(self, candidate: Candidate) -> None:
        self._trial = trial = _Trial(candidate)
        await asyncio.to_thread(
            self._tell
        )  # should it end this process, the next one knows by what
        try:
            model = await self._load(candidate)
            stable = self._worker.model
            if stable and not candidate.returns:
                require_successor(model.bundle.manifest, stable.bundle.manifest, candidate.allowed)
            trial.disagreement = candidate.allowed.disagreement or (
                explained_disagreement(model.bundle.manifest, stable.bundle.manifest)
                if stable
                else 1.0
            )
            if candidate.mode == "canary":
                path = first_uses_path(self._state_folder, candidate.id)
                trial.first_uses = await asyncio.to_thread(FirstUses, path, candidate.salt)
            trial.live = self._worker.make_live(model, "candidate")
        except SlipwayError as error:
            trial.phase, trial.reason = "refused", str(error)
        except Exception as error:
            trial.phase, trial.reason = "refused", f"{type(error).__name__}: {error}"
            logger.exception("rollout: the candidate %s cannot be loaded", candidate.name)
        else:
            trial.phase = "prepared"
            self._let_go(trial, candidate)

    async def _load(self, candidate: Candidate) -> ServedModel:
        settings = settings_of(self._settings, candidate.model)
        if candidate.mode == "shadow":
            # With one thread ONNX Runtime computes on the one that calls, whose priority is low; its own threads would not be.
            settings = settings.model_copy(update={"num_threads": 1})
        is_shadow = candidate.mode == "shadow"
        certified = await at_low_priority(
            lambda: read_certified(
                settings.bundle,
                settings.certificate,
                accept_draft=False,
                accept_missed_gates=is_shadow,
            )
        )
        # At the usual priority, which ONNX Runtime's own threads take over from the one that makes them.
        return await asyncio.to_thread(load_model, settings, certified)

    def _let_go(self, trial: _Trial, candidate: Candidate) -> None:
        """Requests, or copies of them, as the state says."""
        trial.candidate = candidate
        if candidate.phase != "running" or trial.live is None:
            return
        if trial.shadow is None and self._shadow_share:
            count = self._metrics.shadowed
            share, difference = self._shadow_share, candidate.allowed.difference
            trial.shadow = Shadow(
                trial.live, share, candidate.salt, difference, trial.evidence, count
            )
            self._worker.observers.add(trial.shadow)
        if trial.first_uses:
            canary = self._canary or Canary(
                trial.live, trial.evidence, candidate.salt, trial.first_uses
            )
            canary.share, canary.slow_s = candidate.share, candidate.slow_s
            self._route_to(canary)
            self._metrics.candidate_share(candidate.share)

    def _route_to(self, canary: Canary | None) -> None:
        self._canary = self._worker.router = canary

    async def _drop(self) -> None:
        """The candidate ends: no request goes there any more, and those inside finish."""
        trial, self._trial = self._trial, None
        self._route_to(None)
        self._metrics.candidate_share(0)
        if trial and trial.shadow:
            self._worker.observers.remove(trial.shadow)
            await asyncio.to_thread(trial.shadow.close)
        if trial and trial.live:
            await trial.live.retire()
            trial.live = None
            await asyncio.to_thread(give_back_freed_memory)

    def _report(self, *, stopped: bool = False) -> Report:
        trial, model = self._trial, self._worker.model
        evidence = trial.evidence if trial else Evidence()
        latency_s, num_latencies = evidence.stable_latency_s()
        return Report(
            process=os.getpid(),
            started=process_started(os.getpid()),
            stopped=stopped,
            revision=self._rollout.revision,
            serving=model.version if model else None,
            folder=self._stable.folder if self._stable else None,
            problem=self._problem,
            candidate=trial.candidate.id if trial else None,
            phase=trial.phase if trial else "none",
            reason=trial.reason if trial else "",
            disagreement=trial.disagreement if trial else 1.0,
            counts=evidence.counts(),
            stable_p95_s=latency_s,
            num_latencies=num_latencies,
        )

    def _tell(self) -> None:
        """Write the report where it is news."""
        report, before = self._report(), self._reported
        if report == before:
            return
        counted = {"counts", "stable_p95_s", "num_latencies"}
        is_news = (
            before is None
            or report.model_dump(exclude=counted) != before.model_dump(exclude=counted)
            or report.counts.fault
        )
        if is_news or time.monotonic() - self._reported_at >= _REPORT_S:
            self._write(report)

    def _write(self, report: Report) -> None:
        with self._writing:  # a look that was cancelled may still be at it on its thread
            if self._is_stopped and not report.stopped:
                return
            self._is_stopped = report.stopped
            write_report(self._state_folder, report)
            self._reported, self._reported_at = report, time.monotonic()
            self.num_reports += 1
