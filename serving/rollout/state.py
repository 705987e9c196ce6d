"""What is rolled out: one declarative file, SLIPWAY_STATE/rollout.json, which every worker follows and whoever changes it locks.

It is written as a whole or not at all, has a revision that only grows, and is refused if it is not understood. Without the file
the service serves SLIPWAY_BUNDLE. A model that it names wins over that, also at the next start.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import LockedError, SlipwayError

FORMAT_VERSION = 1
FILE = "rollout.json"
OUTCOMES = (
    "swapped",
    "refused",
    "rolled_back",
    "promoted",
)  # of a candidate; what slipway_swaps_total counts
MAX_EVENTS = 50
MAX_HISTORY = 2  # with the stable model, three copies are kept
_LOCK_WAIT_S = 10.0  # changes take milliseconds
_LOCK_POLL_S = 0.02
_threads = threading.Lock()  # the lock of files keeps out other processes only

Outcome = Literal["swapped", "refused", "rolled_back", "promoted"]
Mode = Literal["deploy", "shadow", "canary"]
Share = Annotated[float, Field(gt=0, le=1)]


class RolloutError(SlipwayError):
    """A rollout that is not possible, or a state that cannot be read."""


class Model(Contract):
    """A model whose files were copied into SLIPWAY_STATE/models."""

    folder: Annotated[
        str, Field(pattern=r"^[0-9a-f]{12}-[0-9a-f]{8}$")
    ]  # the version, and the beginning of its certificate's digest
    version: str
    digest: str  # hex SHA-256 of bundle.json


class Allowed(Contract):
    """What a candidate may be worse in."""

    other_contract: bool = (
        False  # other labels, or input that callers of the stable model do not send
    )
    metric_loss: Annotated[float, Field(ge=0)] | None = (
        0.01  # accuracy points, or relative growth of the RMSE; null: not compared
    )
    disagreement: Share | None = (
        None  # share of shadowed requests that may be answered otherwise; null: what both models' metrics explain
    )
    difference: Annotated[float, Field(ge=0)] | None = (
        None  # between two values that count as equal; null: the stable model's interval
    )


class RolloutPlan(Contract):
    """How a canary goes up."""

    steps: Annotated[tuple[Share, ...], Field(min_length=1, max_length=20)] = (
        0.01,
        0.05,
        0.25,
        0.5,
        1.0,
    )
    hold_s: Annotated[float, Field(ge=0)] = 60.0  # each step takes at least so long,
    hold_requests: Annotated[int, Field(ge=1)] = (
        300  # and at least so many requests of the candidate's: a step without evidence is none
    )
    slow_s: Annotated[float, Field(gt=0)] | None = (
        None  # a request that takes longer is slow; null: measured on the stable model
    )


class Candidate(Contract):
    """A model on its way."""

    id: int  # the revision that proposed it
    mode: Mode
    model: Model | None  # null: SLIPWAY_BUNDLE
    replaces: Model | None  # what `rollback` returns to; null: SLIPWAY_BUNDLE
    allowed: Allowed
    plan: RolloutPlan
    phase: Literal[
        "preparing", "running"
    ]  # preparing: every worker loads and checks it, none of them asks it anything
    since: float  # seconds since 1970
    returns: bool = False  # by rollback or reset: to what was served before, so nothing is compared
    clears: bool = False  # by reset: there is nothing to return to afterwards
    step: int = 0  # of plan.steps
    step_since: float = 0.0  # seconds since 1970
    requests_before: int = 0  # that the candidate had answered when the step began
    slow_s: float | None = None  # the bound that is judged by
    salt: str = ""  # a secret that requests are drawn with: who knows it chooses the model by the request's id

    @property
    def share(self) -> float:
        """Of the live requests."""
        return (
            self.plan.steps[self.step] if self.mode == "canary" and self.phase == "running" else 0.0
        )

    @property
    def name(self) -> str:
        """For people."""
        return name_of(self.model)


class Event(Contract):
    """Something that happened to a rollout."""

    number: int
    time: float  # seconds since 1970
    what: Outcome | Literal["began", "step"]
    model: str
    reason: str


class Rollout(Contract):
    """The content of `rollout.json`."""

    format_version: Literal[1]
    revision: int
    stable: Model | None  # null: SLIPWAY_BUNDLE
    history: list[Model | None]  # stable before, the latest last
    candidate: Candidate | None
    events: list[Event]  # the latest last
    num_events: int  # that ever were
    num_told: int  # of them that a worker has counted and logged

    def with_event(
        self, what: Outcome | Literal["began", "step"], model: str, reason: str
    ) -> "Rollout":
        """The same with one event more."""
        event = Event(
            number=self.num_events + 1, time=time.time(), what=what, model=model, reason=reason
        )
        return self.changed(events=[*self.events, event][-MAX_EVENTS:], num_events=event.number)

    def changed(self, **changes: object) -> "Rollout":
        """The same with other fields, validated."""
        return self.model_validate(dict(self) | changes)

    def ended(self, what: Outcome, reason: str) -> "Rollout":
        """Without the candidate, which came to that; `promoted` and `swapped` make it the stable model."""
        candidate = self.candidate
        assert candidate is not None
        after = self.changed(candidate=None)
        if what in ("swapped", "promoted"):
            history = (
                self.history[:-1]
                if candidate.returns
                else [*self.history, candidate.replaces][-MAX_HISTORY:]
            )
            after = after.changed(
                stable=candidate.model, history=[] if candidate.clears else history
            )
        return after.with_event(what, candidate.name, reason)

    @property
    def models(self) -> set[str]:
        """Folders of the models that are named somewhere."""
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
    num_told=0,
)


def name_of(model: Model | None) -> str:
    """A model's version, for people."""
    return model.version if model else "SLIPWAY_BUNDLE"


def read_rollout(folder: Path) -> Rollout:
    """The state in SLIPWAY_STATE; nothing rolled out where there is no file. RolloutError if it is not what we write."""
    path = folder / FILE
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return EMPTY
    except (ValueError, OSError) as error:
        raise RolloutError(
            f"{path} cannot be read: {error}. Remove it, and SLIPWAY_BUNDLE is served; or put it right."
        ) from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise RolloutError(
            f"{path} has format version {version!r}, this Slipway reads version {FORMAT_VERSION}. Remove it, or upgrade Slipway."
        )
    try:
        return Rollout.model_validate(content)
    except ValidationError as error:
        raise RolloutError(
            f"{path} is not a rollout: {error}. Remove it, and SLIPWAY_BUNDLE is served; or put it right."
        ) from None


def change_rollout(folder: Path, change: Callable[[Rollout], Rollout]) -> Rollout:
    """Put what `change` makes of the state in its place, one at a time; it is written only if it is another.

    `change` is called under the lock with the state as it is then. LockedError if others hold the lock for seconds.
    """
    with state_lock(folder):
        before = read_rollout(folder)
        after = change(before)
        if after == before:
            return before
        after = after.changed(revision=before.revision + 1)
        text = files.canonical_json(after.model_dump(mode="json"))
        files.write_text(
            folder / FILE, text, files.PRIVATE
        )  # it has the secret that requests are drawn with
        return after


@contextmanager
def state_lock(folder: Path) -> Iterator[None]:
    """Nobody else changes the state meanwhile."""
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
