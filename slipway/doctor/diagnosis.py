"""What the doctor writes down: `reports/doctor.json`. Times are medians over rounds, with the lowest and the highest."""

import statistics
from collections.abc import Iterable
from typing import Any

from slipway.data.store.raw_times import RawTimes
from slipway.doctor.cures import Bottleneck
from slipway.doctor.loader_times import LoaderTimes
from slipway.doctor.step_times import PARTS, Part, Round
from slipway.system.contract import Contract


class Spread(Contract):
    """A median over rounds."""

    median: float
    low: float
    high: float


class Account(Contract):
    """An optimizer step, in milliseconds."""

    rounds: int
    step_ms: Spread
    parts_ms: dict[Part, Spread]
    rows_per_second: float
    queued_share: float  # of the step, in which the trainer's threads stood in line for a core; of all of them together


class Trial(Contract):
    """A step's compute with a change, as a multiple of the present one."""

    name: str
    changes: dict[str, Any]  # of the section train
    ratio: Spread | None  # null where it could not be tried; for another batch size, for each row
    note: str  # why not, or in what way it would learn otherwise
    learns_otherwise: bool
    expected_gain: float | None  # of a whole step, times as fast


class Proposal(Contract):
    """A patch of params.yaml."""

    changes: dict[str, Any]  # by "section.key"
    expected_step_ms: float
    expected_gain: float  # times as fast
    reasons: list[str]


class Proof(Contract):
    """The proposal measured beside the present settings, in turns."""

    account: Account
    expected_gain: float
    measured_gain: Spread

    @property
    def error(self) -> float:
        """The measured gain over the expected one, less 1."""
        return self.measured_gain.median / self.expected_gain - 1


class RawCare(Contract):
    """The data before the packed store."""

    times: RawTimes | None  # null where it could not be measured
    note: str
    num_images: int
    num_workers: int  # of precompute
    expected_seconds: float
    better_num_workers: int | None  # null where the present number is as good
    better_seconds: float


class Diagnosis(Contract):
    """Everything."""

    machine: str
    runs_as: str
    account: Account
    bottleneck: Bottleneck
    loader: LoaderTimes
    raw: RawCare | None
    trials: list[Trial]
    proposal: Proposal | None
    proof: Proof | None
    notes: list[str]  # what could not be separated, and what else is to be known


def spread(values: Iterable[float]) -> Spread:
    """Of at least one value."""
    found = list(values)
    return Spread(median=statistics.median(found), low=min(found), high=max(found))


def account_of(
    rounds: list[Round],
    batch_size: int,
    parts: list[Round] | None = None,
    silent: list[Round] | None = None,
) -> Account:
    """The step from `rounds`; its parts from `parts`, where they were measured in rounds of their own.

    `silent` are rounds of DDP without communication: what a backward pass takes longer than theirs is communication.
    """
    parts = parts or rounds
    found = {part: spread(each.parts_ms[part] for each in parts) for part in PARTS}
    if silent:
        pairs = [
            (each.parts_ms["backward"], other.parts_ms["backward"])
            for each, other in zip(parts, silent, strict=True)
        ]
        exposed = spread(max(0.0, backward - alone) for backward, alone in pairs)
        found["backward"] = spread(min(pair) for pair in pairs)
        found["communication"] = spread(
            each.parts_ms["communication"] + exposed.median for each in parts
        )
    step = spread(each.step_ms for each in rounds)
    queued = statistics.median(each.queued_ms / each.step_ms for each in rounds)
    return Account(
        rounds=len(rounds),
        step_ms=step,
        parts_ms=found,
        rows_per_second=batch_size / step.median * 1000,
        queued_share=queued,
    )


def median_loader(rounds: list[LoaderTimes]) -> LoaderTimes:
    """Field by field."""
    dumps = [each.model_dump() for each in rounds]
    fields = {
        name: statistics.median(dump[name] for dump in dumps)
        for name in dumps[0]
        if name != "batch_ms"
    }
    batch_ms = {
        number: statistics.median(each.batch_ms[number] for each in rounds)
        for number in rounds[0].batch_ms
    }
    return LoaderTimes(batch_ms=batch_ms, **fields)
