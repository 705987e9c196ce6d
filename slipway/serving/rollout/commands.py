"""The commands of a rollout: deploy, shadow, canary, promote, abort, rollback, reset.

`python -m slipway.serving.rollout` and `POST /rollout` run them. They use SLIPWAY_STATE, and
SLIPWAY_DATABASE_URL if several services share the rollout. They verify and copy a model and write
the desired state, which the workers reconcile. If no worker runs, `deploy`, `rollback` and `reset`
take effect at the next start.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slipway.artifacts.bundle import MANIFEST, load_bundle
from slipway.artifacts.engine_manifest import ENGINE_MANIFEST
from slipway.predictor.loader import read_certified
from slipway.serving.rollout.comparison import require_successor
from slipway.serving.rollout.decision import decide
from slipway.serving.rollout.history import Author, change_rollout
from slipway.serving.rollout.records.model_files import publish
from slipway.serving.rollout.records.sync import sync
from slipway.serving.rollout.rehearsal import rehearse
from slipway.serving.rollout.reports import Report, iso, read_reports
from slipway.serving.rollout.state import (
    Allowed,
    Candidate,
    Event,
    Mode,
    Model,
    Rollout,
    RolloutError,
    RolloutPlan,
    name_of,
    read_rollout,
)
from slipway.serving.rollout.store import (
    add_model,
    command_lock,
    prune_models,
    rehearsal_mark,
    settings_of,
)
from slipway.serving.settings import Settings
from slipway.system import files
from slipway.system.errors import SlipwayError
from slipway.traffic.postgres import given_url

_POLL_S = 0.1
_UNKNOWN = Author("")
CALM_S = 600.0  # after a candidate ended; until then `rollback` must name the version to leave


def propose(
    settings: Settings,
    mode: Mode,
    bundle: Path,
    *,
    certificate: Path | None = None,
    engine: Path | None = None,
    allowed: Allowed | None = None,
    plan: RolloutPlan | None = None,
    author: Author = _UNKNOWN,
) -> Rollout:
    """Propose a bundle as the candidate of a rollout.

    First the bundle is verified, copied, and loaded once in a separate process. If no worker runs,
    the next start serves it. Certificate and engine default to those next to the bundle. Raises
    SlipwayError if there is a candidate already, or if the model is refused; a refusal is also
    recorded as an event of the state.
    """
    allowed, plan = allowed or Allowed(), plan or RolloutPlan()
    if list(plan.steps) != sorted(set(plan.steps)):
        raise RolloutError(
            f"the steps are {list(plan.steps)}, "
            "expected rising fractions, such as 0.01, 0.05, 0.25, 0.5, 1."
        )
    with _shared_command(settings.state):
        _require_idle(read_rollout(settings.state))
        alive = _alive(settings.state)
        if mode != "deploy" and not alive:
            raise RolloutError(
                f"no worker follows {settings.state}, so nothing can be compared. "
                "Start the service, or deploy the bundle."
            )
        try:
            model = _verified_copy(settings, mode, bundle, certificate, engine)
            if not alive:  # if workers run, they compare
                _require_successor(settings, model, allowed)
        except SlipwayError as error:
            name, reason = _version(bundle), str(error)
            change_rollout(
                settings.state,
                lambda rollout: rollout.with_event("refused", name, reason, author.name),
            )
            prune_models(settings.state)
            raise
        replaces = _copy_of_stable(settings, alive)
        if url := given_url():
            for new in filter(None, (model, replaces)):
                publish(url, settings.state, new)
        return _put(
            settings,
            lambda now: _candidate(now, mode, model, replaces=replaces, allowed=allowed, plan=plan),
            alive,
            author,
        )


def promote(settings: Settings, author: Author = _UNKNOWN) -> Rollout:
    """Make the candidate the stable model now, without further evidence.

    Every worker has a canary in memory already. A shadow is loaded again, with all threads. Raises
    GateMissedError if a shadow missed its quality gates.
    """
    with _shared_command(settings.state):
        candidate = _require_candidate(read_rollout(settings.state))
        if candidate.phase == "preparing":
            raise RolloutError(
                f"{candidate.name} is still being loaded by the workers. "
                "Wait until `status` says that it is running."
            )
        if candidate.mode == "shadow":
            copy = settings_of(settings, candidate.model)
            read_certified(copy.bundle, copy.certificate, accept_draft=False)  # checks the gates
            return change_rollout(settings.state, lambda now: _deploy_shadow(now, author))
        return change_rollout(
            settings.state,
            lambda rollout: _require_same(rollout, candidate).ended(
                "promoted", author.because, author.name
            ),
        )


def abort(settings: Settings, author: Author = _UNKNOWN) -> Rollout:
    """End the candidate's rollout, in any mode. The stable model continues to serve."""
    with _shared_command(settings.state):
        rollout = read_rollout(settings.state)
        if rollout.candidate is None:
            stable = _describe_stable(rollout, _stable_names(settings, rollout))
            raise RolloutError(
                f"there is no candidate to end; {stable} is served."
                f"{_describe_last(rollout)} Nothing was changed."
            )
        return _end(settings, rollout.candidate, author)


def rollback(
    settings: Settings,
    version: str | None = None,
    clock: Callable[[], float] = time.time,
    author: Author = _UNKNOWN,
) -> Rollout:
    """Stop serving a version: end the candidate, or return to the former stable model.

    Raises RolloutError if `version` is neither: it ended by itself or by another operator, and
    another model serves now. Without a version, the command applies to the candidate, or else to
    the stable model. It is refused within CALM_S after a candidate ended, because the operator
    probably meant that candidate. The same holds for a version that the stable model shares with
    the ended candidate; then only the name of the stable model's folder is unambiguous.
    """
    with _shared_command(settings.state):
        rollout = read_rollout(settings.state)
        candidate, names = rollout.candidate, _stable_names(settings, rollout)
        stable = _describe_stable(rollout, names)
        if candidate and version in (None, candidate.name):
            return _end(settings, candidate, author)
        if candidate:
            raise RolloutError(
                f"{version} is not the candidate, which is {candidate.name} "
                f"({candidate.mode}, {candidate.phase}); {stable} is the stable model. "
                "End the candidate first (`abort`). Nothing was changed."
            )
        if version is not None and version not in names:
            raise RolloutError(
                f"{version} is not served; {stable} is."
                f"{_describe_last(rollout, version)} Nothing was changed."
            )
        if not rollout.history:
            raise RolloutError(
                "there is no earlier model to return to. "
                "Deploy a bundle, or `reset` to SLIPWAY_BUNDLE."
            )
        before = rollout.history[-1]
        ended = _ended_lately(rollout, clock())
        if ended and version in (None, ended.model):
            unambiguous = names[-1] if ended.model == names[0] else stable
            raise RolloutError(
                f"{_describe(ended)} {stable} is served, and would be replaced by "
                f"{name_of(before)}. Nothing was changed. "
                f"To stop serving {stable}, name it: rollback {unambiguous}"
            )
        return _put(
            settings,
            lambda now: _candidate(now, "deploy", before, replaces=now.stable, returns=True),
            _alive(settings.state),
            author,
        )


def reset(settings: Settings, author: Author = _UNKNOWN) -> Rollout:
    """Return to the model of SLIPWAY_BUNDLE, and clear the list of events."""
    with _shared_command(settings.state):
        _require_idle(read_rollout(settings.state))
        return _put(
            settings,
            lambda now: _candidate(now, "deploy", None, returns=True, clears=True),
            _alive(settings.state),
            author,
        )


BY_NAME = {"promote": promote, "abort": abort, "reset": reset}


def wait(settings: Settings, seconds: float) -> tuple[Rollout, list[Report]]:
    """Wait until no candidate is loading and every worker serves the stable model.

    Returns the state, and the reports of the workers that do not serve it.
    """
    deadline = time.monotonic() + seconds
    while True:
        sync(settings.state)
        reports = read_reports(settings.state)
        # Workers decide. If the last one died, this process has to.
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


@contextmanager
def _shared_command(state: Path) -> Iterator[None]:
    """Run a command under a lock, on the newest state if several services share the rollout."""
    with command_lock(state):
        sync(state, is_locked=True)
        yield


def _verified_copy(
    settings: Settings, mode: Mode, bundle: Path, certificate: Path | None, engine: Path | None
) -> Model:
    if not (bundle / MANIFEST).is_file():
        raise RolloutError(
            f"{bundle.absolute()} is not a bundle: it has no {MANIFEST}. "
            "Name the folder that has it."
        )
    inside = bundle / "certificate.json"  # a release has it in the bundle
    beside_it = bundle.parent / "certificate.json"
    certificate = certificate or (inside if inside.is_file() else beside_it)
    beside = bundle.parent / "engine"
    engine = engine or (beside if (beside / ENGINE_MANIFEST).exists() else None)
    model = add_model(settings.state, bundle, certificate, engine, is_shadow=mode == "shadow")
    mark = rehearsal_mark(settings.state, model)
    if not mark.exists():
        rehearse(settings_of(settings, model))
        files.write_bytes(mark, b"")
    return model


def _require_successor(settings: Settings, model: Model, allowed: Allowed) -> None:
    """Raise RolloutError if `model` may not replace the stable model, as the workers would do.

    Checks nothing if the stable model cannot be read.
    """
    try:
        stable = load_bundle(
            settings_of(settings, read_rollout(settings.state).stable).bundle
        ).manifest
    except SlipwayError:
        return
    require_successor(load_bundle(settings_of(settings, model).bundle).manifest, stable, allowed)


def _copy_of_stable(settings: Settings, alive: list[Report]) -> Model | None:
    """Return the model that a rollback restores: a copy of the present stable model.

    SLIPWAY_BUNDLE is copied if the workers serve it. Returns None if no copy can be made.
    """
    stable = read_rollout(settings.state).stable
    if stable:
        return stable
    try:
        copy = add_model(settings.state, settings.bundle, settings.certificate, settings.engine)
    except SlipwayError:
        return None
    if any(report.serving != copy.version for report in alive):
        return None
    files.write_bytes(rehearsal_mark(settings.state, copy), b"")
    return copy


def _candidate(rollout: Rollout, mode: Mode, model: Model | None, **fields: object) -> Candidate:
    """Return a new candidate with a unique id and a secret salt."""
    defaults = {"replaces": None, "allowed": Allowed(), "plan": RolloutPlan()}
    new = {
        "id": rollout.revision + 1,
        "mode": mode,
        "model": model,
        "phase": "preparing",
        "since": time.time(),
        "salt": secrets.token_hex(16),
    }
    return Candidate.model_validate(defaults | fields | new)


def _deploy_shadow(rollout: Rollout, author: Author) -> Rollout:
    candidate = _require_candidate(rollout)
    same = {name: getattr(candidate, name) for name in ("replaces", "allowed", "plan")}
    return _proposed(rollout, _candidate(rollout, "deploy", candidate.model, **same), author)


def _proposed(rollout: Rollout, candidate: Candidate, author: Author) -> Rollout:
    reason = f"{candidate.mode} {author.because}"
    return rollout.changed(candidate=candidate).with_event(
        "proposed", candidate.name, reason, author.name
    )


def _put(
    settings: Settings,
    make: Callable[[Rollout], Candidate],
    alive: list[Report],
    author: Author,
) -> Rollout:
    """Write the candidate that `make` creates into the state, for the workers to load.

    If no worker runs, it becomes the stable model at once, and the next start serves it.
    """

    def change(rollout: Rollout) -> Rollout:
        _require_idle(rollout)
        proposed = _proposed(rollout, make(rollout), author)
        if alive:
            return proposed
        return proposed.ended("swapped", "no worker runs; the next start serves it")

    rollout = change_rollout(settings.state, change)
    prune_models(settings.state)
    return rollout


def _end(settings: Settings, candidate: Candidate, author: Author) -> Rollout:
    return change_rollout(
        settings.state,
        lambda now: _require_same(now, candidate).ended("rolled_back", author.because, author.name),
    )


def _stable_names(settings: Settings, rollout: Rollout) -> list[str]:
    """Return the names by which commands may refer to the stable model.

    They are its version and the name of its folder, or else SLIPWAY_BUNDLE and the versions of it
    that workers serve.
    """
    if rollout.stable:
        return [rollout.stable.version, rollout.stable.folder]
    served = {report.serving for report in _alive(settings.state) if report.serving}
    return [name_of(None), *sorted(served)]


def _describe_stable(rollout: Rollout, names: list[str]) -> str:
    return names[0] if rollout.stable else " ".join(names)


def _ended_lately(rollout: Rollout, now: float) -> Event | None:
    """Return the last event in which a model was rolled back or refused less than CALM_S ago.

    Refusals count too: as after a rollback, a healthy model serves in place of the bad one.
    """
    for event in reversed(rollout.events):
        if event.what in ("rolled_back", "refused") and now - event.time < CALM_S:
            return event
    return None


def _describe_last(rollout: Rollout, version: str | None = None) -> str:
    """Describe the last event in a sentence, with a leading space, to append to a message.

    With `version`, only events of that version count. Returns "" if there is none.
    """
    for event in reversed(rollout.events):
        if version in (None, event.model):
            return f" {_describe(event)}"
    return ""


def _describe(event: Event) -> str:
    what, reason = event.what.replace("_", " "), event.reason.rstrip(".")
    return f"{event.model} {what} at {iso(event.time)}: {reason}."


def _require_same(rollout: Rollout, candidate: Candidate) -> Rollout:
    if rollout.candidate is None or rollout.candidate.id != candidate.id:
        raise RolloutError(
            f"{candidate.name} is no longer a candidate: {rollout.events[-1].reason}."
        )
    return rollout


def _require_idle(rollout: Rollout) -> None:
    if rollout.candidate:
        candidate = rollout.candidate
        raise RolloutError(
            f"{candidate.name} is being rolled out ({candidate.mode}, {candidate.phase}). "
            "`promote` or `abort` it first."
        )


def _require_candidate(rollout: Rollout) -> Candidate:
    if rollout.candidate is None:
        raise RolloutError(
            f"there is no candidate; the stable model is {name_of(rollout.stable)}. "
            "Propose one with `shadow` or `canary`."
        )
    return rollout.candidate


def _alive(state: Path) -> list[Report]:
    return [report for report in read_reports(state) if report.is_alive]


def _version(bundle: Path) -> str:
    try:
        return load_bundle(bundle).version
    except SlipwayError:
        return "of no version"
