"""The desired state of the rollout, in SLIPWAY_STATE/rollout.json.

Only slipway/serving/rollout/history.py and records/ change the file. With SLIPWAY_DATABASE_URL it
is a copy of the state that several services share. A file in an unknown format is refused.
Without the file the service serves SLIPWAY_BUNDLE. A stable model in the file takes precedence over
SLIPWAY_BUNDLE, also after a restart.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field

from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import LockedError, SlipwayError

FILE = "rollout.json"
MAX_EVENTS = 50
MAX_HISTORY = 2  # with the stable model, three copies stay on disk
_LOCK_WAIT_S = 10.0  # changes take milliseconds
_LOCK_POLL_S = 0.02
_threads = threading.Lock()  # the file lock excludes other processes only

Outcome = Literal["swapped", "refused", "rolled_back", "promoted"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)  # the labels of slipway_swaps_total
Mode = Literal["deploy", "shadow", "canary"]
Fraction = Annotated[float, Field(gt=0, le=1)]


class RolloutError(SlipwayError):
    """A rollout command is not possible now, or the state cannot be read."""


class Model(Contract):
    """A rolled-out model, whose files were copied to SLIPWAY_STATE/models."""

    # The version, and the beginnings of the digests of the certificate and of any signature.
    folder: Annotated[str, Field(pattern=r"^[0-9a-f]{12}(-[0-9a-f]{8}){1,2}$")]
    version: str
    digest: str  # SHA-256 of bundle.json, in hex


class Allowed(Contract):
    """Differences from the stable model that the operator accepts."""

    # Other labels, or inputs that callers of the stable model do not send.
    other_contract: bool = False
    # Accuracy points, or relative growth of the RMSE; null: not compared.
    metric_loss: Annotated[float, Field(ge=0)] | None = 0.01
    # Fraction of shadowed requests with different answers; null: explained by both metrics.
    disagreement: Fraction | None = None
    # Between two values that count as equal; null: the stable model's interval.
    difference: Annotated[float, Field(ge=0)] | None = None


class RolloutPlan(Contract):
    """The steps of a canary, and the evidence that each step requires."""

    steps: Annotated[tuple[Fraction, ...], Field(min_length=1, max_length=20)] = (
        0.01,
        0.05,
        0.25,
        0.5,
        1.0,
    )
    hold_s: Annotated[float, Field(ge=0)] = 60.0  # minimum duration of a step
    # Minimum number of the candidate's requests in a step: without evidence no step ends.
    hold_requests: Annotated[int, Field(ge=1)] = 300
    # Requests that take longer are slow; null: measured on the stable model.
    slow_s: Annotated[float, Field(gt=0)] | None = None


class Candidate(Contract):
    """A model that is being rolled out."""

    id: int  # the revision that proposed it
    mode: Mode
    model: Model | None  # null: SLIPWAY_BUNDLE
    replaces: Model | None  # the model that `rollback` returns to; null: SLIPWAY_BUNDLE
    allowed: Allowed
    plan: RolloutPlan
    phase: Literal["preparing", "running"]  # preparing: workers load it and send it no request
    since: float  # seconds since 1970
    returns: bool = False  # True for rollback or reset: served before, so it is not compared
    clears: bool = False  # True for reset: afterwards there is nothing to return to
    step: int = 0  # index in plan.steps
    step_since: float = 0.0  # seconds since 1970
    requests_before: int = 0  # requests that the candidate had answered when the step began
    slow_s: float | None = None  # the bound in use
    # Secret that draws the requests: knowing it, a caller could choose the model by request id.
    salt: str = ""

    @property
    def fraction(self) -> float:
        """The fraction of live requests that the candidate serves."""
        is_routed = self.mode == "canary" and self.phase == "running"
        return self.plan.steps[self.step] if is_routed else 0.0

    @property
    def name(self) -> str:
        """The model's version, or SLIPWAY_BUNDLE."""
        return name_of(self.model)


EventKind = Literal["proposed", "swapped", "refused", "rolled_back", "promoted", "began", "step"]


class Event(Contract):
    """An event of a rollout, such as a promotion: kind, model and reason."""

    number: int
    time: float  # seconds since 1970
    what: EventKind
    model: str
    reason: str
    by: str = ""  # the operator; "": the workers decided


class Rollout(Contract):
    """The content of `rollout.json`: stable model, candidate, history and latest events."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    format_version: Literal[1]
    revision: int
    stable: Model | None  # null: SLIPWAY_BUNDLE
    history: list[Model | None]  # former stable models, the latest last
    candidate: Candidate | None
    events: list[Event]  # the latest last
    num_events: int  # number of events over all time
    num_logged: int = Field(alias="num_told")  # events that a worker has counted and logged

    def with_event(self, what: EventKind, model: str, reason: str, by: str = "") -> "Rollout":
        """Return a copy of the state with one more event."""
        event = Event(
            number=self.num_events + 1,
            time=time.time(),
            what=what,
            model=model,
            reason=reason,
            by=by,
        )
        return self.changed(events=[*self.events, event][-MAX_EVENTS:], num_events=event.number)

    def changed(self, **changes: object) -> "Rollout":
        """Return a validated copy of the state with changed fields."""
        return self.model_validate(dict(self) | changes)

    def ended(self, what: Outcome, reason: str, by: str = "") -> "Rollout":
        """Return a copy in which the rollout has ended, with an event.

        With the outcomes `promoted` and `swapped` the candidate becomes the stable model.
        """
        candidate = self.candidate
        assert candidate is not None
        after = self.changed(candidate=None)
        if what in ("swapped", "promoted"):
            if candidate.clears:
                history = []
            elif candidate.returns:
                history = self.history[:-1]
            else:
                history = [*self.history, candidate.replaces][-MAX_HISTORY:]
            after = after.changed(stable=candidate.model, history=history)
        return after.with_event(what, candidate.name, reason, by)

    @property
    def folders(self) -> set[str]:
        """The folders of all models in the state."""
        candidate = (self.candidate.model, self.candidate.replaces) if self.candidate else ()
        return {model.folder for model in (self.stable, *self.history, *candidate) if model}


EMPTY = Rollout(
    format_version=1,
    revision=0,
    stable=None,
    history=[],
    candidate=None,
    events=[],
    num_events=0,
    num_logged=0,
)


def name_of(model: Model | None) -> str:
    """Return the version of a model, or SLIPWAY_BUNDLE for None."""
    return model.version if model else "SLIPWAY_BUNDLE"


def read_rollout(folder: Path) -> Rollout:
    """Read the state in `folder`; EMPTY without a file. Raises RolloutError if it is invalid."""
    path = folder / FILE
    fix = "Correct it, or remove it to serve SLIPWAY_BUNDLE."
    try:
        payload = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return EMPTY
    except OSError as error:
        raise RolloutError(f"cannot read {path}: {error}. {fix}") from None
    return parse_record(Rollout, path, payload, RolloutError, fix)


def write_rollout(folder: Path, rollout: Rollout) -> None:
    """Write the state into `folder`, readable by its owner only. Call it within `state_lock`."""
    text = files.canonical_json(rollout.model_dump(mode="json", by_alias=True))
    files.write_text(folder / FILE, text, files.PRIVATE)  # because of the secret salt


@contextmanager
def state_lock(folder: Path) -> Iterator[None]:
    """Let only one thread at a time, over all processes, change the rollout's files in `folder`.

    Raises LockedError if another one holds the lock for seconds.
    """
    deadline = time.monotonic() + _LOCK_WAIT_S
    with _threads:
        while True:
            try:
                with files.lock(folder / "rollout.lock", "a change of the rollout"):
                    yield
                return
            except LockedError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOCK_POLL_S)
