"""Reads the facts that decide the loop's next step from a real project and service.

Only reads. slipway/loop/machine.py chooses the step from the facts, slipway/loop/steps.py takes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.locations import BUNDLE
from slipway.config.loop import LoopParams
from slipway.config.params import Params
from slipway.drift.reference import Reference, read_reference
from slipway.loop.journal import FOLDER, JOURNAL, Cycle, LoopError, read_journal
from slipway.loop.label_keys import KeyRecord, key_name, suspicious_keys
from slipway.loop.machine import CandidateFacts, LoopFacts
from slipway.loop.triggers import (
    confirmed_drift,
    enough_labels,
    missed_objective,
    moved_further,
    settled_span,
)
from slipway.serving.rollout.evidence import total
from slipway.serving.rollout.records.database import read_recorded
from slipway.serving.rollout.records.entries import Entry
from slipway.serving.rollout.reports import read_reports
from slipway.serving.rollout.state import read_rollout
from slipway.serving.rollout.store import settings_of
from slipway.serving.settings import Settings
from slipway.traffic.monitoring_records import (
    JoinedLabel,
    JudgedWindow,
    read_joined_labels,
    read_judged_windows,
)

_ARTIFACTS = Path("artifacts")


@dataclass(frozen=True)
class ObservedProject:
    """The project in the working directory, and the service of `settings`."""

    params: Params
    settings: Settings
    request_log: Path

    @property
    def loop(self) -> LoopParams:
        assert self.params.loop is not None
        return self.params.loop

    @property
    def folder(self) -> Path:
        """The folder of the loop's journal, with a subfolder for each cycle."""
        return self.settings.state / FOLDER

    def place(self, cycle: int) -> Path:
        """Return the folder that holds a cycle's candidate and decision request."""
        return self.folder / f"{cycle:04d}"

    def served(self) -> LoadedBundle:
        """Return the served bundle: the rollout's stable model, else that of SLIPWAY_BUNDLE."""
        stable = read_rollout(self.settings.state).stable
        return load_bundle(settings_of(self.settings, stable).bundle)

    def require_own_copy(self) -> None:
        """Raise LoopError if a training would overwrite the files of the served model."""
        if read_rollout(self.settings.state).stable is not None:
            return
        bundle = self.settings.bundle.resolve()
        if bundle.is_relative_to(_ARTIFACTS.resolve()):
            raise LoopError(
                f"the service serves {self.settings.bundle}, which the next training overwrites; "
                "expected a copy of its own, so that nothing reaches a caller without a decision. "
                f"Deploy it once: slipway rollout deploy {BUNDLE}"
            )

    def facts(self, last: Cycle | None, now: float) -> LoopFacts:
        """Return the facts that decide the step after cycle `last`; `now` in seconds since 1970."""
        bundle = self.served()
        is_open = last is not None and last.is_open
        refused = {record.key for record in self.refused_keys(bundle)}
        labels = self._usable_labels({bundle.version}, refused)
        # Evidence from before the end of the last cycle begins no new one.
        ended = last.steps[-1].time if last else 0.0
        since = last.detail("triggered")["since"] if last and is_open else ended
        return LoopFacts(
            now=now,
            reasons=() if is_open else self._reasons(bundle, labels, last, since, refused),
            num_labels=sum(label.answered >= since for label in labels),
            served=bundle.version,
            candidate=self.candidate_facts(last) if last and is_open else CandidateFacts(),
        )

    def _usable_labels(self, versions: set[str], refused: set[str]) -> list[JoinedLabel]:
        return [
            label
            for label in read_joined_labels(self.settings.state, *versions)
            if key_name(label.caller) not in refused
        ]

    def refused_keys(self, bundle: LoadedBundle) -> list[KeyRecord]:
        """Return the API keys whose labels are not used.

        A comparison of an earlier cycle contradicted their labels, or they are suspicious now.
        """
        named = [
            KeyRecord.model_validate(record)
            for step in read_journal(self.folder / JOURNAL)
            if step.what == "compared"
            for record in step.detail["comparison"]["contradicted"]
        ]
        found = {one.key: one for one in named if one.key not in self.loop.trusted_keys}
        rest = self._usable_labels({bundle.version}, set(found))
        return [*found.values(), *suspicious_keys(rest, self.loop.trusted_keys)]

    def _reasons(
        self,
        bundle: LoadedBundle,
        labels: Sequence[JoinedLabel],
        last: Cycle | None,
        since: float,
        refused: set[str],
    ) -> tuple[str, ...]:
        triggers, found = self.loop.triggers, []
        if triggers.drift and (drift := self._new_drift(bundle, labels, last, since)):
            found.append(drift[0])
        if triggers.objective is not None:
            found.append(missed_objective(bundle.manifest, labels, triggers.objective))
        # Labels that arrived after the last cycle collected its rows have trained no model yet,
        # those of the model that this cycle replaced included.
        used, before = 0.0, bundle.version
        if last:
            used = last.time_of("collected" if last.has("collected") else "triggered")
            before = last.detail("triggered")["served"]
        new = [
            one
            for one in self._usable_labels({bundle.version, before}, refused)
            if one.joined > used
        ]
        found.append(enough_labels(len(new), self.loop))
        return tuple(reason for reason in found if reason)

    def _new_drift(
        self,
        bundle: LoadedBundle,
        labels: Sequence[JoinedLabel],
        last: Cycle | None,
        since: float,
    ) -> tuple[str, float] | None:
        """Return confirmed drift that no cycle has shown to be harmless, like `confirmed_drift`."""

        def num_labels(begin: float, end: float | None) -> int:
            return sum(
                label.answered >= begin and (end is None or label.joined <= end) for label in labels
            )

        def reference_of(model: str) -> Reference:
            found = read_reference(bundle, model.partition("/")[2])
            assert found is not None  # else there were no windows
            return found

        windows: Sequence[JudgedWindow] = read_judged_windows(self.settings.state, bundle.version)
        if span := settled_span(last, bundle.version, num_labels):
            windows = moved_further(windows, cache(reference_of), span)
        return confirmed_drift(windows, since)

    def drift(self, version: str, since: float) -> tuple[str, float] | None:
        return confirmed_drift(read_judged_windows(self.settings.state, version), since)

    def candidate_facts(self, cycle: Cycle) -> CandidateFacts:
        """Return the state of the rollout from the view of this cycle's candidate."""
        state = self.settings.state
        rollout, reports = read_rollout(state), read_reports(state)
        workers = sum(report.is_alive for report in reports)
        candidate = rollout.candidate
        if not cycle.has("trained"):
            return CandidateFacts(workers, candidate.name if candidate else "")
        trained = cycle.detail("trained")
        is_own = (
            candidate is not None
            and candidate.model is not None
            and candidate.model.digest == trained["bundle_digest"]
        )
        shadow, canary = self.stage_of(cycle, "shadow"), self.stage_of(cycle, "canary")
        newest = canary or shadow
        counts = total(
            report.counts
            for report in reports
            if candidate is not None and report.candidate == candidate.id
        )
        return CandidateFacts(
            workers=workers,
            other=candidate.name if candidate and not is_own else "",
            shadow="none" if not shadow else ("running" if is_own else "ended"),
            shadowed=sum(counts.disagreements) if is_own else 0,
            canary=_canary_state(canary),
            why=newest[-1].reason if newest else "",
        )

    def stage_of(self, cycle: Cycle, mode: str) -> list[Entry]:
        """Return the candidate's history entries since this cycle proposed it in `mode`.

        `mode` is "shadow" or "canary"; [] if it was not proposed yet.
        """
        mark = f"{mode} by command: {mark_of(cycle)}"
        version = cycle.detail("trained")["version"]
        recorded = read_recorded(self.settings.state)
        entries = [entry for entry in recorded.entries if entry.model == version]
        for place, entry in enumerate(entries):
            if entry.what == "proposed" and entry.reason.startswith(mark):
                return entries[place:]
        return []


def _canary_state(entries: Sequence[Entry]) -> Any:
    if not entries:
        return "none"
    for entry in entries:
        if entry.what in ("promoted", "swapped"):
            return "promoted"
        if entry.what in ("rolled_back", "refused"):
            return "returned"
    return "running"


def mark_of(cycle: Cycle) -> str:
    """Return the prefix of reasons in the history that marks the events of this cycle."""
    return f"loop cycle {cycle.number}:"
