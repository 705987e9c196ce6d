"""Commands of operators: deploy, shadow, canary, promote, abort, rollback, reset.

`python -m serving.rollout` and `POST /rollout` carry them out.

They work on SLIPWAY_STATE alone, without a network: they check and copy a model, and write down what is wanted; workers follow.
Where none runs, `deploy` and the ways back take effect at the next start.
"""

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from serving.models.loading import read_certified
from serving.rollout.comparing import require_successor
from serving.rollout.deciding import decide
from serving.rollout.rehearsal import rehearse
from serving.rollout.reports import Report, read_reports
from serving.rollout.state import (
    Allowed,
    Candidate,
    Event,
    Mode,
    Model,
    Rollout,
    RolloutError,
    RolloutPlan,
    change_rollout,
    name_of,
    read_rollout,
)
from serving.rollout.status import iso
from serving.rollout.store import (
    add_model,
    commanding,
    is_tried,
    note_tried,
    prune_models,
    settings_of,
)
from serving.settings import Settings
from slipway.artifacts.bundle import MANIFEST, load_bundle
from slipway.artifacts.engine_manifest import ENGINE_MANIFEST
from slipway.system.errors import SlipwayError

_POLL_S = 0.1
CALM_S = 600.0  # after a candidate went, `rollback` has to name the version that is to be left


def propose(
    settings: Settings,
    mode: Mode,
    bundle: Path,
    *,
    certificate: Path | None = None,
    engine: Path | None = None,
    allowed: Allowed | None = None,
    plan: RolloutPlan | None = None,
) -> Rollout:
    """Check a bundle, copy it, load it once in a process of its own, and let the workers prepare it; with none, the next start serves it.

    A certificate and an engine that are not given are those beside the bundle. SlipwayError with the reason if the model is
    refused, which the state then tells too, or if another is on its way.
    """
    allowed, plan = allowed or Allowed(), plan or RolloutPlan()
    _require_rising(plan)
    with commanding(settings.state):
        _require_idle(read_rollout(settings.state))
        alive = _alive(settings.state)
        if mode != "deploy" and not alive:
            raise RolloutError(
                f"no worker follows {settings.state}, so nothing can be compared. Start the service, or deploy the bundle."
            )
        try:
            model = _checked(settings, mode, bundle, certificate, engine)
            if not alive:
                _require_successor(settings, model, allowed)
        except SlipwayError as error:
            name, reason = _version(bundle), str(error)
            change_rollout(
                settings.state, lambda rollout: rollout.with_event("refused", name, reason)
            )
            prune_models(settings.state, read_rollout(settings.state).models)
            raise
        replaces = _adopted(settings, alive)
        return _put(
            settings,
            lambda now: _candidate(now, mode, model, replaces=replaces, allowed=allowed, plan=plan),
            alive,
        )


def promote(settings: Settings) -> Rollout:
    """Make the candidate the stable model now. A canary is warm in every worker; a shadow is loaded once more, as it has to run alone.

    GateMissedError for a shadow that did not pass its quality gates.
    """
    with commanding(settings.state):
        candidate = _require_candidate(read_rollout(settings.state))
        if candidate.phase == "preparing":
            raise RolloutError(
                f"{candidate.name} is still being loaded by the workers. Wait until `status` says that it is running."
            )
        if candidate.mode == "shadow":
            copy = settings_of(settings, candidate.model)
            read_certified(
                copy.bundle, copy.certificate, accept_draft=False
            )  # a shadow may have missed its gates
            return change_rollout(settings.state, _deployed)
        return change_rollout(
            settings.state,
            lambda rollout: _same(rollout, candidate).ended("promoted", "by command"),
        )


def abort(settings: Settings) -> Rollout:
    """End the candidate, whatever its mode. The stable model serves on; RolloutError if there is no candidate."""
    with commanding(settings.state):
        rollout = read_rollout(settings.state)
        if rollout.candidate is None:
            stable = _stable_told(rollout, _stable_names(settings, rollout))
            raise RolloutError(
                f"there is no candidate to end; {stable} is served.{_last(rollout)} Nothing was changed."
            )
        return _end(settings, rollout.candidate)


def rollback(
    settings: Settings, version: str | None = None, clock: Callable[[], float] = time.time
) -> Rollout:
    """Leave the model of that version: end it if it is the candidate, return to the model before if it is stable.

    RolloutError if it is neither: it went meanwhile, by itself or by another operator, and what serves now is another model. Without
    a version the candidate is left, else the stable model, but not within CALM_S after a candidate went: probably that one is meant.
    The same holds for a version that the stable model shares with a candidate that went; the stable one's folder names it alone.
    """
    with commanding(settings.state):
        rollout = read_rollout(settings.state)
        candidate, names = rollout.candidate, _stable_names(settings, rollout)
        stable = _stable_told(rollout, names)
        if candidate and version in (None, candidate.name):
            return _end(settings, candidate)
        if candidate:
            raise RolloutError(
                f"{version} is not the candidate, which is {candidate.name} ({candidate.mode}, {candidate.phase}); "
                f"{stable} is the stable model. End the candidate first (`abort`). Nothing was changed."
            )
        if version is not None and version not in names:
            raise RolloutError(
                f"{version} is not served; {stable} is.{_last(rollout, version)} Nothing was changed."
            )
        if not rollout.history:
            raise RolloutError(
                "nothing was served before that could be returned to. Deploy a bundle, or `reset` to SLIPWAY_BUNDLE."
            )
        gone = _gone_lately(rollout, clock())
        if gone and version in (None, gone.model):
            alone = names[-1] if gone.model == names[0] else stable
            raise RolloutError(
                f"{_told(gone)} {stable} is served, and would be replaced by {name_of(rollout.history[-1])}. Nothing was changed. "
                f"If {stable} is to be left, name it: rollback {alone}"
            )
        before = rollout.history[-1]
        return _put(
            settings,
            lambda now: _candidate(now, "deploy", before, replaces=now.stable, returns=True),
            _alive(settings.state),
        )


def reset(settings: Settings) -> Rollout:
    """Return to SLIPWAY_BUNDLE, and forget what was rolled out."""
    with commanding(settings.state):
        _require_idle(read_rollout(settings.state))
        return _put(
            settings,
            lambda now: _candidate(now, "deploy", None, returns=True, clears=True),
            _alive(settings.state),
        )


def wait(settings: Settings, seconds: float) -> tuple[Rollout, list[Report]]:
    """Wait until no candidate is being prepared and each worker serves what the state says; the state, and the workers that do not."""
    deadline = time.monotonic() + seconds
    while True:
        reports = read_reports(settings.state)
        # Workers decide; should the last of them have died, somebody has to say so.
        rollout = change_rollout(
            settings.state, lambda now: decide(now, read_reports(settings.state), time.time())
        )
        folder = rollout.stable.folder if rollout.stable else None
        late = [
            report
            for report in reports
            if report.is_alive and (report.folder != folder or report.problem)
        ]
        is_preparing = rollout.candidate is not None and rollout.candidate.phase == "preparing"
        if (not is_preparing and not late) or time.monotonic() > deadline:
            return rollout, late
        time.sleep(_POLL_S)


def _checked(
    settings: Settings, mode: Mode, bundle: Path, certificate: Path | None, engine: Path | None
) -> Model:
    if not (bundle / MANIFEST).is_file():
        raise RolloutError(
            f"{bundle.absolute()}, which was named, is not a bundle: it has no {MANIFEST}. Name the folder that has it."
        )
    certificate = certificate or bundle.parent / "certificate.json"
    beside = bundle.parent / "engine"
    engine = engine or (beside if (beside / ENGINE_MANIFEST).exists() else None)
    model = add_model(settings.state, bundle, certificate, engine, is_shadow=mode == "shadow")
    if not is_tried(settings.state, model):
        rehearse(settings_of(settings, model))
        note_tried(settings.state, model)
    return model


def _require_successor(settings: Settings, model: Model, allowed: Allowed) -> None:
    """As the workers do; with a stable model that cannot be read there is nothing to compare."""
    try:
        stable = load_bundle(
            settings_of(settings, read_rollout(settings.state).stable).bundle
        ).manifest
    except SlipwayError:
        return
    require_successor(load_bundle(settings_of(settings, model).bundle).manifest, stable, allowed)


def _adopted(settings: Settings, alive: list[Report]) -> Model | None:
    """What is replaced: a copy of SLIPWAY_BUNDLE, if that is still what the workers serve, so that a way back is there whatever comes."""
    stable = read_rollout(settings.state).stable
    if stable:
        return stable
    try:
        copy = add_model(settings.state, settings.bundle, settings.certificate, settings.engine)
    except SlipwayError:
        return None
    if any(report.serving != copy.version for report in alive):
        return None
    note_tried(settings.state, copy)
    return copy


def _candidate(rollout: Rollout, mode: Mode, model: Model | None, **fields: object) -> Candidate:
    """A new candidate, whose id no other ever had."""
    content = {
        "replaces": None,
        "allowed": Allowed(),
        "plan": RolloutPlan(),
        "phase": "preparing",
        "since": time.time(),
    } | fields
    content["salt"] = secrets.token_hex(16)
    return Candidate.model_validate(
        {"id": rollout.revision + 1, "mode": mode, "model": model} | content
    )


def _deployed(rollout: Rollout) -> Rollout:
    """A shadow that is to be deployed."""
    candidate = _require_candidate(rollout)
    kept = {name: getattr(candidate, name) for name in ("replaces", "allowed", "plan")}
    return rollout.changed(candidate=_candidate(rollout, "deploy", candidate.model, **kept))


def _put(settings: Settings, make: Callable[[Rollout], Candidate], alive: list[Report]) -> Rollout:
    """Propose a candidate to the workers; where there are none, it is what the next start serves."""

    def change(rollout: Rollout) -> Rollout:
        _require_idle(rollout)
        proposed = rollout.changed(candidate=make(rollout))
        return (
            proposed
            if alive
            else proposed.ended("swapped", "no worker runs; the next start serves it")
        )

    rollout = change_rollout(settings.state, change)
    prune_models(settings.state, rollout.models)
    return rollout


def _end(settings: Settings, candidate: Candidate) -> Rollout:
    return change_rollout(
        settings.state, lambda now: _same(now, candidate).ended("rolled_back", "by command")
    )


def _stable_names(settings: Settings, rollout: Rollout) -> list[str]:
    """The names of the stable model: its version and its folder; or SLIPWAY_BUNDLE and the version that workers serve of it."""
    if rollout.stable:
        return [rollout.stable.version, rollout.stable.folder]
    return [
        name_of(None),
        *sorted({report.serving for report in _alive(settings.state) if report.serving}),
    ]


def _stable_told(rollout: Rollout, names: list[str]) -> str:
    """The stable model, for people."""
    return names[0] if rollout.stable else " ".join(names)


def _gone_lately(rollout: Rollout, now: float) -> Event | None:
    """The event of the last model that was rolled back or refused, if that was less than CALM_S ago.

    A refused one counts, because the model that it left in its place is healthy all the same.
    """
    gone = (event for event in reversed(rollout.events) if event.what in ("rolled_back", "refused"))
    return next((event for event in gone if now - event.time < CALM_S), None)


def _last(rollout: Rollout, version: str | None = None) -> str:
    """A sentence on the last event, of any model or of that version, with a space before; empty if there is none."""
    events = (event for event in reversed(rollout.events) if version in (None, event.model))
    last = next(events, None)
    return f" {_told(last)}" if last else ""


def _told(event: Event) -> str:
    return f"{event.model} {event.what.replace('_', ' ')} at {iso(event.time)}: {event.reason.rstrip('.')}."


def _same(rollout: Rollout, candidate: Candidate) -> Rollout:
    if rollout.candidate is None or rollout.candidate.id != candidate.id:
        raise RolloutError(
            f"{candidate.name} is no candidate any more: {rollout.events[-1].reason}."
        )
    return rollout


def _require_idle(rollout: Rollout) -> None:
    if rollout.candidate:
        candidate = rollout.candidate
        raise RolloutError(
            f"{candidate.name} is on its way ({candidate.mode}, {candidate.phase}). `promote` or `abort` it first."
        )


def _require_candidate(rollout: Rollout) -> Candidate:
    if rollout.candidate is None:
        raise RolloutError(
            f"there is no candidate; the stable model is {name_of(rollout.stable)}. Propose one with `shadow` or `canary`."
        )
    return rollout.candidate


def _require_rising(plan: RolloutPlan) -> None:
    if list(plan.steps) != sorted(set(plan.steps)):
        raise RolloutError(
            f"the steps are {list(plan.steps)}, expected shares that rise, as 0.01, 0.05, 0.25, 0.5, 1."
        )


def _alive(state: Path) -> list[Report]:
    return [report for report in read_reports(state) if report.is_alive]


def _version(bundle: Path) -> str:
    """Of a bundle that may not be one."""
    try:
        return load_bundle(bundle).version
    except SlipwayError:
        return "of no version"
