"""What bounds a step, and which changes of params.yaml are worth a trial.

A trial is a short training on one batch, beside the present one: it tells how long a step computes with other settings. What
would change which weights are learned (batch size, number of processes) is told and never part of the proposal.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipway.config.sections import TrainParams
from slipway.doctor.forecast import Facts, waits
from slipway.doctor.step_times import Part
from slipway.kinds.registry import Task, is_table
from slipway.system.contract import Contract
from slipway.training.distributed.execution import missing_compiler
from slipway.training.distributed.strategies import Placement


class Bottleneck(Contract):
    """The part that a step spends most of its time in."""

    name: str  # "reading", "decoding", "making batches", "copy", "compute", "communication", "optimizer", "loop"
    share: float  # of the step
    text: str


@dataclass(frozen=True)
class Candidate:
    """A change of the section train that may make a step shorter."""

    changes: Mapping[str, Any]
    learns_otherwise: str = ""  # in what way; "" where the same is learned, up to rounding

    @property
    def name(self) -> str:
        """Such as "precision bf16-mixed"."""
        return ", ".join(
            f"{key} {str(value).lower() if isinstance(value, bool) else value}"
            for key, value in self.changes.items()
        )


def find_bottleneck(parts_ms: Mapping[Part, float], facts: Facts, *, is_jpeg: bool) -> Bottleneck:
    """The largest part; of waiting for data, what it is that takes so long."""
    total = sum(parts_ms.values())
    groups = {
        "data": parts_ms["data"],
        "copy": parts_ms["copy"],
        "compute": parts_ms["forward"] + parts_ms["backward"],
        "communication": parts_ms["communication"],
        "optimizer": parts_ms["optimizer"],
        "loop": parts_ms["other"],
    }
    largest = max(groups, key=lambda name: groups[name])
    share = groups[largest] / total
    if largest == "data":
        name, why = _why_data(facts, is_jpeg)
        return Bottleneck(
            name=name,
            share=share,
            text=f"{share:.0%} of a step is spent waiting for its batch: {why}",
        )
    texts = {
        "copy": "copying batches to the device",
        "compute": "the network: forward and backward",
        "communication": "communication between processes",
        "optimizer": "clipping and updating weights",
        "loop": "the loop around the steps, and the ends of short epochs",
    }
    return Bottleneck(name=largest, share=share, text=f"{share:.0%} of a step is {texts[largest]}")


def _why_data(facts: Facts, is_jpeg: bool) -> tuple[str, str]:
    loader = facts.loader
    how = "it waits (for a disk, say) rather than computes" if facts.loader_waits else "it computes"
    whole = f"{loader.batch_ms[0]:.1f} ms for a batch in one process; {how}"
    if facts.reading_share < 0.5:
        return "making batches", f"changing the images takes longest, not reading them: {whole}"
    if is_jpeg and not waits(loader.read_ms, loader.read_processor_ms, loader.read_queued_ms):
        return "decoding", f"decoding the stored JPEGs takes longest: {whole}"
    return "reading", f"reading the stored rows takes longest: {whole}"


def candidates(
    params: TrainParams, placement: Placement, task: Task, num_train: int, num_cores: int
) -> list[Candidate]:
    """What a trial may show to be faster here."""
    # On the CPU bfloat16 was slow in either layout, and slowest with channels last (bench/LOG.md): tried without.
    plain = (
        {"channels_last": False}
        if placement.accelerator == "cpu" and placement.zero_stage is None and not is_table(task)
        else {}
    )
    found = [Candidate({"precision": name, **plain}) for name in _other_precisions(placement)]
    if (
        not params.compile
        and placement.zero_stage != 3
        and not missing_compiler(placement.accelerator)
    ):
        found.append(Candidate({"compile": True}))
    if placement.zero_stage is None and not is_table(task):
        found.append(Candidate({"channels_last": params.channels_last is False}))
    if placement.zero_stage is not None:
        found.append(Candidate({"strategy": "single" if placement.world_size == 1 else "ddp"}))
    if (
        placement.world_size == 1
        and placement.accelerator == "cpu"
        and num_cores > 1
        and params.batch_size % num_cores == 0
    ):
        reason = "norms then see the rows of one process"
        found.append(Candidate({"strategy": "ddp", "devices": num_cores}, reason))
    if 2 * params.batch_size <= num_train:
        found.append(
            Candidate(
                {"batch_size": 2 * params.batch_size},
                "half as many steps; the learning rate has to be chosen anew",
            )
        )
    return found


def _other_precisions(placement: Placement) -> list[str]:
    names = (
        ["32-true", "bf16-mixed", "16-mixed"]
        if placement.accelerator == "gpu"
        else ["32-true", "bf16-mixed"]
    )
    faster = names[names.index(placement.precision) + 1 :] if placement.precision in names else []
    return (
        faster
        if placement.accelerator == "cpu"
        else [name for name in names[1:] if name != placement.precision]
    )
