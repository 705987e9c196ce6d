"""Content of `reports/profile.json`; times are medians over rounds, with their range."""

import statistics
from collections.abc import Iterable
from typing import Any

from slipway.profiling.input_pipeline import InputPipelineProfile
from slipway.profiling.loader_times import LoaderTimes
from slipway.profiling.step_times import PARTS, Part, Round
from slipway.system.contract import Contract


class Spread(Contract):
    """The median and the range of a value over rounds."""

    median: float
    low: float
    high: float


class StepAccount(Contract):
    """The time of an optimizer step and of its parts, in milliseconds."""

    rounds: int
    step_ms: Spread
    parts_ms: dict[Part, Spread]
    rows_per_second: float
    queued_fraction: float  # time that threads of the trainer queue for a core, summed, of a step


class Utilisation(Contract):
    """The speed of a step's operations, compared with the machine's speed of matrix products."""

    step_flop: int  # products, convolutions and attention, forward and backward, all processes
    dtype: str  # dtype of the training's matrix products, such as "bfloat16"
    num_devices: int  # GPUs; 1 for all cores of the CPU
    rates: dict[str, float]  # FLOP/s of one device for products of square matrices, by dtype
    fraction: Spread  # reached fraction of the rate of all devices in `dtype`


class Bottleneck(Contract):
    """The slowest part of a step."""

    name: str  # "reading", "decoding", "making batches", "copy", "compute", "communication", ...
    fraction: float  # fraction of the step
    text: str


class TrialResult(Contract):
    """The computing time of a step with other settings, relative to the current settings."""

    name: str
    changes: dict[str, Any]  # settings of the section train
    ratio: Spread | None  # null if the trial failed; for another batch size a ratio per row
    note: str  # reason of a failure, or the effect on the learned weights
    learns_otherwise: bool
    expected_gain: float  # speed of a whole step as a multiple of the current; 0 after a failure

    @property
    def median_ratio(self) -> float:
        return self.ratio.median if self.ratio else 1.0

    @property
    def is_faster(self) -> bool:
        """True if the trial was faster in every round; a lower median alone may be luck."""
        return self.ratio is not None and self.ratio.high < 1 and not self.learns_otherwise


class SettingsProposal(Contract):
    """Proposed changes of params.yaml, with the expected gain and the reasons."""

    changes: dict[str, Any]  # new values by "section.key"
    expected_step_ms: float
    expected_gain: float  # expected speed as a multiple of the current one
    reasons: list[str]


class Proof(Contract):
    """Measured times of the proposed and the current settings."""

    account: StepAccount
    expected_gain: float
    measured_gain: Spread

    @property
    def error(self) -> float:
        """The relative error of the expected gain: measured gain / expected gain - 1."""
        return self.measured_gain.median / self.expected_gain - 1


class ProfileReport(Contract):
    """The content of the report that `slipway profile` writes."""

    machine: str
    runs_as: str
    account: StepAccount
    utilisation: Utilisation | None  # null if the operations are not counted
    bottleneck: Bottleneck
    loader: LoaderTimes
    raw: InputPipelineProfile | None  # null for tables
    trials: list[TrialResult]
    proposal: SettingsProposal | None
    proof: Proof | None
    notes: list[str]  # remarks, such as parts of a step that could not be separated


def spread(values: Iterable[float]) -> Spread:
    """Return the median and range of one or more values."""
    found = list(values)
    return Spread(median=statistics.median(found), low=min(found), high=max(found))


def step_account(
    rounds: list[Round],
    batch_size: int,
    synchronised: list[Round] | None = None,
    silent: list[Round] | None = None,
) -> StepAccount:
    """Summarise the measured rounds of training steps.

    Args:
        rounds: rounds that give the time of the step, and of its parts without `synchronised`.
        synchronised: rounds that waited for the GPU after each part, and give the parts.
        silent: rounds of DDP without communication. The extra time of a backward pass over theirs
            counts as communication.
    """
    with_parts = synchronised or rounds
    parts = {part: spread(each.parts_ms[part] for each in with_parts) for part in PARTS}
    if silent:
        backwards = [
            (each.parts_ms["backward"], other.parts_ms["backward"])
            for each, other in zip(with_parts, silent, strict=True)
        ]
        exposed = spread(max(0.0, full - without) for full, without in backwards)
        parts["backward"] = spread(min(pair) for pair in backwards)
        parts["communication"] = spread(
            each.parts_ms["communication"] + exposed.median for each in with_parts
        )
    step = spread(each.step_ms for each in rounds)
    return StepAccount(
        rounds=len(rounds),
        step_ms=step,
        parts_ms=parts,
        rows_per_second=batch_size / step.median * 1000,
        queued_fraction=statistics.median(each.queued_ms / each.step_ms for each in rounds),
    )


def median_loader(rounds: list[LoaderTimes]) -> LoaderTimes:
    """Return the median of each field over the rounds."""
    names = LoaderTimes.model_fields.keys() - {"batch_ms"}
    fields = {name: statistics.median(getattr(each, name) for each in rounds) for name in names}
    batch_ms = {
        number: statistics.median(each.batch_ms[number] for each in rounds)
        for number in rounds[0].batch_ms
    }
    return LoaderTimes(batch_ms=batch_ms, **fields)
