"""Makes one worker match the desired rollout state, which it polls every 250 ms.

Each worker polls the state every 250 ms, loads and swaps models, routes canary traffic, and reports
its progress. This happens outside the request path: if it fails, the stable model continues to
serve. The first worker that sees that a candidate must advance, end or be promoted writes that
decision into the state.
"""

import asyncio
import logging
import os
import threading
import time
from pathlib import Path

from slipway.serving.models.live_model import LiveModel
from slipway.serving.models.loader import load_model
from slipway.serving.rollout.candidate.trial import Trial
from slipway.serving.rollout.decision import decide
from slipway.serving.rollout.evidence import Evidence
from slipway.serving.rollout.history import change_rollout, record_served, return_alone
from slipway.serving.rollout.metrics import RolloutMetrics
from slipway.serving.rollout.records.sync import RolloutSync, sync
from slipway.serving.rollout.reports import (
    Report,
    describe,
    process_started,
    read_reports,
    remove_old_reports,
    write_report,
)
from slipway.serving.rollout.state import (
    EMPTY,
    FILE,
    Model,
    Rollout,
    name_of,
    read_rollout,
)
from slipway.serving.rollout.store import prune_unless_locked, settings_of
from slipway.serving.settings import Settings
from slipway.serving.worker import ModelWorker
from slipway.system.errors import SlipwayError, UnavailableError
from slipway.system.malloc import return_memory_to_os
from slipway.traffic.postgres import given_url

logger = logging.getLogger("bentoml.slipway")

POLL_S = 0.25
_REPORT_S = 1.0  # least time between two reports that differ only in counts


def sync_at_start(state: Path) -> None:
    """Copy the shared state of several services. Without the database, use the last copy."""
    try:
        sync(state)
    except (SlipwayError, OSError) as error:
        logger.warning("starting with the last known rollout in %s: %s", state, error)


class RolloutReconciler:
    """Reconciles one worker with the desired rollout state, and reports its progress."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self._metrics = RolloutMetrics(worker.metrics)
        self._settings = worker.settings
        self._state_folder = worker.settings.state
        self._rollout = EMPTY
        self._stamp: tuple[int, int] | None = None
        self._stable: Model | None = None  # the model that is served
        self._initial_revision = -1  # revision of the first load; -1: the state could not be read
        self._problem = ""
        self._failed_revision = -1  # revision at which the stable model last failed to load
        self._trial: Trial | None = None
        self._reported: Report | None = None
        self._reported_at = 0.0
        self._writing = threading.Lock()
        self._is_stopped = False
        self.num_reports = 0  # written so far
        self._recorded = ""  # version of SLIPWAY_BUNDLE that the history records
        self._has_recorded = False  # True once this start is in the history
        self._sync: RolloutSync | None = None  # of a rollout that several services share
        self._last_error = ""
        self._task: asyncio.Task[None] | None = None

    def initial_settings(self) -> Settings:
        """Return settings for the first model. Raises SlipwayError if that model is missing."""
        if self._settings.accept_draft:  # the verify stage always checks SLIPWAY_BUNDLE
            return self._settings
        sync_at_start(self._state_folder)
        self._rollout = read_rollout(self._state_folder)
        self._stable, self._initial_revision = self._rollout.stable, self._rollout.revision
        if self._stable:
            logger.info(
                "serving the rolled-out model %s instead of SLIPWAY_BUNDLE (state: %s)",
                self._stable.version,
                self._state_folder / FILE,
            )
        return settings_of(self._settings, self._stable)

    def model_info(self) -> dict[str, object]:
        """Return the rolled-out models for `/model`. `wins_over` is the replaced SLIPWAY_BUNDLE."""
        wins_over = str(self._settings.bundle) if self._stable else None
        return {
            "stable": name_of(self._stable),
            "wins_over": wins_over,
            "candidate": self._trial.candidate.name if self._trial else None,
        }

    def start(self) -> None:
        """Start to poll the state. The service that the verify stage starts does not poll."""
        if not self._settings.accept_draft:
            self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Free the candidate, and report that this worker stops as intended."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        report = self._report(stopped=True)
        await self._drop()
        if self._task and self._reported:
            try:
                await asyncio.to_thread(self._write, report)
                if self._sync:
                    await asyncio.to_thread(self._sync.rounds.close)
            except OSError as error:
                logger.error(
                    "cannot report to the rollout in %s that this worker stops: %s; "
                    "it counts as dead",
                    self._state_folder,
                    error,
                )

    def note_wrong(self, model_version: str) -> None:
        """Count a wrong prediction of `model_version` for the trial. Any thread may call it."""
        if trial := self._trial:
            trial.note_wrong(model_version)

    def status(self) -> dict[str, object]:
        """Return the status for the page and `GET /rollout`. Reads files: call it on a thread."""
        return describe(read_rollout(self._state_folder), read_reports(self._state_folder))

    async def reconcile(self) -> None:
        """Read the desired state once, and change this worker accordingly."""
        if self._has_changed():
            try:
                self._rollout = await asyncio.to_thread(read_rollout, self._state_folder)
            except SlipwayError:
                self._stamp = None  # so that the state is read again
                raise
        if not self.num_reports:
            rollout = self._rollout
            await asyncio.to_thread(
                remove_old_reports,
                self._state_folder,
                rollout.candidate.id if rollout.candidate else None,
            )
        # Decide before loading a candidate, which may have killed the previous process here.
        await self._decide()
        await self._reconcile_stable()
        await self._reconcile_candidate()
        await asyncio.to_thread(self._report_changes)
        await self._record_served()
        if self._sync is None and given_url() is not None:
            metrics = self._worker.metrics
            self._sync = RolloutSync(self._state_folder, lambda: metrics.fault("rollout"))
            self._sync.rounds.start()

    async def _run(self) -> None:
        await self._worker.loaded()
        while True:
            try:
                await self.reconcile()
                self._last_error = ""
            except Exception as error:  # a full disk, or a state edited by hand
                self._worker.metrics.fault("rollout")
                # Unlike its repr, the text of an OSError has its path.
                message = f"{type(error).__name__}: {error}"
                if message != self._last_error:
                    self._last_error = message
                    logger.error(
                        "cannot follow the rollout in %s: %s; the model in use continues to serve",
                        self._state_folder,
                        message,
                        exc_info=not isinstance(error, SlipwayError | OSError),
                    )
            await asyncio.sleep(POLL_S)

    async def _record_served(self) -> None:
        """Record in the history that SLIPWAY_BUNDLE is served, once for each of its versions.

        A history that several services share also has the start with a rolled-out model.
        """
        model, settings = self._worker.model, self._settings
        if self._stable is not None:
            self._recorded = ""
            if self._has_recorded or given_url() is None:
                return
            settings = settings_of(settings, self._stable)  # each service records its start
        if model is None or model.version == self._recorded:
            return
        self._recorded, self._has_recorded = model.version, True  # before: a failure is logged once
        bundle, certificate = settings.bundle, settings.certificate
        await asyncio.to_thread(
            record_served, self._state_folder, model.version, bundle, certificate
        )

    def _has_changed(self) -> bool:
        """Return True if the state file changed since the last call."""
        try:
            status = (self._state_folder / FILE).stat()
            stamp = (status.st_mtime_ns, status.st_ino)
        except (FileNotFoundError, NotADirectoryError):
            stamp = (0, 0)
        changed, self._stamp = stamp != self._stamp, stamp
        return changed

    async def _decide(self) -> None:
        rollout = self._rollout
        has_new_events = rollout.num_logged < rollout.num_events
        if rollout.candidate is None and not has_new_events:
            return
        reports = await asyncio.to_thread(read_reports, self._state_folder)
        if has_new_events or decide(rollout, reports, time.time()) != rollout:
            self._rollout = await asyncio.to_thread(self._write_decision)

    def _write_decision(self) -> Rollout:
        reports = read_reports(self._state_folder)
        num_logged = 0

        def change(rollout: Rollout) -> Rollout:
            nonlocal num_logged
            num_logged = rollout.num_logged
            after = decide(rollout, reports, time.time())
            return after.changed(num_logged=after.num_events)

        try:
            after = change_rollout(self._state_folder, change)
        except UnavailableError:
            alone = return_alone(
                self._state_folder, lambda rollout: decide(rollout, reports, time.time())
            )
            if alone is None:
                raise
            num_logged, after = alone.num_events - 1, alone
        for event in after.events:
            if event.number > num_logged:
                self._metrics.log(event)
        remove_old_reports(self._state_folder, after.candidate.id if after.candidate else None)
        if after.candidate is None:
            prune_unless_locked(self._state_folder)
        return after

    async def _reconcile_stable(self) -> None:
        wanted, revision = self._rollout.stable, self._rollout.revision
        has_tried = self._worker.model is not None or revision == self._initial_revision
        if wanted == self._stable and has_tried:
            return
        if revision == self._failed_revision:
            return  # only another state changes a failure to load
        try:
            live = await self._stable_live(wanted)
        except Exception as error:
            self._failed_revision = revision
            self._problem = f"{name_of(wanted)} cannot be served: {error}"
            logger.error(
                "rollout: %s; model %s continues to serve", self._problem, name_of(self._stable)
            )
            return
        self._stable, self._problem = wanted, ""
        if self._trial:
            self._trial.stop_routing()
        await self._worker.take_over(live)
        del live
        await asyncio.to_thread(return_memory_to_os)

    async def _stable_live(self, wanted: Model | None) -> LiveModel:
        """Return the loaded stable model. A canary that was promoted is already in memory."""
        trial = self._trial
        is_warm = trial and trial.candidate.mode != "shadow" and trial.candidate.model == wanted
        if trial and is_warm and (live := trial.take_live()):
            return live
        settings = settings_of(self._settings, wanted)
        return self._worker.make_live(await asyncio.to_thread(load_model, settings), "stable")

    async def _reconcile_candidate(self) -> None:
        candidate, trial = self._rollout.candidate, self._trial
        if trial and (candidate is None or trial.candidate.id != candidate.id):
            await self._drop()
            trial = None
        if candidate is None:
            return
        if trial is None:
            self._trial = trial = Trial(candidate, self._worker, self._metrics, self._state_folder)
            # Should it kill this process, the report names the candidate.
            await asyncio.to_thread(self._report_changes)
            await trial.prepare()
        elif trial.phase == "prepared":
            trial.route(candidate)

    async def _drop(self) -> None:
        """End the trial of the candidate in this worker."""
        trial, self._trial = self._trial, None
        if trial:
            await trial.close()

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

    def _report_changes(self) -> None:
        """Write this worker's report if it changed.

        If only counts changed, it is written at most once in _REPORT_S seconds.
        """
        report, before = self._report(), self._reported
        if report == before:
            return
        counted = {"counts", "stable_p95_s", "num_latencies"}
        is_urgent = (
            before is None
            or report.model_dump(exclude=counted) != before.model_dump(exclude=counted)
            or report.counts.fault
        )
        if is_urgent or time.monotonic() - self._reported_at >= _REPORT_S:
            self._write(report)

    def _write(self, report: Report) -> None:
        with self._writing:  # a cancelled reconciliation may still be writing on its thread
            if self._is_stopped and not report.stopped:
                return
            self._is_stopped = report.stopped
            write_report(self._state_folder, report)
            self._reported, self._reported_at = report, time.monotonic()
            self.num_reports += 1
