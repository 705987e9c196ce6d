"""Finds the bottleneck of a training step, and proposes faster settings.

A trial is a short training on a single batch with other settings. Trials and the current settings
are timed in turns, which compares the computing time of their steps. Changes that affect the
learned weights (batch size, number of processes) are reported but never proposed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipway.config.training import TrainParams
from slipway.kinds.registry import Task, kind_of
from slipway.profiling.forecast import MIN_GAIN, Facts, best_num_workers, expected_step_ms, waits
from slipway.profiling.report import Bottleneck, SettingsProposal, TrialResult
from slipway.profiling.step_times import Part
from slipway.training.distributed.execution import missing_compiler
from slipway.training.distributed.placement import Placement


@dataclass(frozen=True)
class TrialCandidate:
    """Changes of settings in the section train that may shorten a step."""

    changes: Mapping[str, Any]
    learns_otherwise: str = ""  # the effect on the learned weights; "" for rounding only

    @property
    def name(self) -> str:
        """The changes as text, such as "precision bf16-mixed"."""
        texts = []
        for key, value in self.changes.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            texts.append(f"{key} {text}")
        return ", ".join(texts)


def find_bottleneck(parts_ms: Mapping[Part, float], facts: Facts, *, is_jpeg: bool) -> Bottleneck:
    """Return the slowest part of a step, or of the data loading if that is the slowest part."""
    compute_ms = parts_ms["forward"] + parts_ms["backward"]
    named = {
        "data": ("spent waiting for its batch", parts_ms["data"]),
        "copy": ("copying batches to the device", parts_ms["copy"]),
        "compute": ("the network: forward and backward", compute_ms),
        "communication": ("communication between processes", parts_ms["communication"]),
        "optimizer": ("clipping and updating weights", parts_ms["optimizer"]),
        "loop": ("the loop around the steps, and the ends of short epochs", parts_ms["other"]),
    }
    name = max(named, key=lambda name: named[name][1])
    text, milliseconds = named[name]
    if name == "data":
        name, reason = _slow_loading(facts, is_jpeg)
        text = f"{text}: {reason}"
    fraction = milliseconds / sum(parts_ms.values())
    return Bottleneck(name=name, fraction=fraction, text=f"{fraction:.0%} of a step is {text}")


def _slow_loading(facts: Facts, is_jpeg: bool) -> tuple[str, str]:
    loader = facts.loader
    how = "it waits (for a disk, say) rather than computes" if facts.loader_waits else "it computes"
    batch = f"{loader.batch_ms[0]:.1f} ms for a batch in one process; {how}"
    if facts.reading_fraction < 0.5:
        return "making batches", f"changing the images takes longest, not reading them: {batch}"
    if is_jpeg and not waits(loader.read_ms, loader.read_processor_ms, loader.read_queued_ms):
        return "decoding", f"decoding the stored JPEGs takes longest: {batch}"
    return "reading", f"reading the stored rows takes longest: {batch}"


def trial_candidates(
    params: TrainParams, placement: Placement, task: Task, num_train: int, num_cores: int
) -> list[TrialCandidate]:
    """Return the changes that apply to the current settings and may be faster on this machine."""
    on_cpu, uses_deepspeed = placement.accelerator == "cpu", placement.zero_stage is not None
    has_layout = not uses_deepspeed and kind_of(task).input.has_pixels
    # bfloat16 on the CPU was slow in either layout, and slowest with channels last (bench/LOG.md).
    layout = {"channels_last": False} if on_cpu and has_layout else {}
    found = [TrialCandidate({"precision": name, **layout}) for name in _precisions(placement)]
    can_compile = placement.zero_stage != 3 and not missing_compiler(placement.accelerator)
    if can_compile and not params.compile:
        found.append(TrialCandidate({"compile": True}))
    if has_layout:
        found.append(TrialCandidate({"channels_last": params.channels_last is False}))
    if uses_deepspeed:
        strategy = "single" if placement.world_size == 1 else "ddp"
        found.append(TrialCandidate({"strategy": strategy}))
    is_divisible = num_cores > 1 and params.batch_size % num_cores == 0
    if on_cpu and placement.world_size == 1 and is_divisible:
        difference = "normalisation then sees the rows of one process"
        found.append(TrialCandidate({"strategy": "ddp", "devices": num_cores}, difference))
    if 2 * params.batch_size <= num_train:
        difference = "half as many steps; choose the learning rate again"
        found.append(TrialCandidate({"batch_size": 2 * params.batch_size}, difference))
    return found


def _precisions(placement: Placement) -> list[str]:
    """Return the other precisions to try; on the CPU, only those with fewer bits."""
    if placement.accelerator == "cpu":
        return ["bf16-mixed"] if placement.precision == "32-true" else []
    return [name for name in ("bf16-mixed", "16-mixed") if name != placement.precision]


class _Loading(NamedTuple):
    """Settings for loading batches, with the step time predicted for them."""

    num_workers: int
    step_ms: float
    saved_ms: float = 0.0  # time saved on each batch by storing pixels instead of JPEGs


def propose_settings(
    facts: Facts, trials: Sequence[TrialResult], *, is_jpeg: bool
) -> SettingsProposal | None:
    """Combine the fastest trial with the fastest loading; return None if the gain is negligible."""
    changes: dict[str, Any] = {}
    reasons = []
    ratio = 1.0
    gaining = [trial for trial in trials if trial.is_faster and trial.expected_gain > MIN_GAIN]
    if gaining:
        best = min(gaining, key=lambda trial: trial.median_ratio)
        ratio = best.median_ratio
        changes = {f"train.{key}": value for key, value in best.changes.items()}
        reasons.append(f"{best.name}: a step computes {1 / ratio:.2f} times as fast")
    loading = _fastest_loading(facts, ratio, is_jpeg)
    if loading.saved_ms:
        changes["precompute.encoding"] = "raw"
        reasons.append(
            f"pixels instead of JPEGs: {loading.saved_ms:.1f} ms less for each batch, for about "
            "eight times the disk"
        )
    if _should_change_workers(facts, loading, ratio):
        changes["train.num_workers"] = loading.num_workers
        reasons.append(_workers_reason(facts, loading.num_workers))
    gain = facts.step_ms / loading.step_ms
    if not changes or gain < MIN_GAIN:
        return None
    return SettingsProposal(
        changes=changes, expected_step_ms=loading.step_ms, expected_gain=gain, reasons=reasons
    )


def _fastest_loading(facts: Facts, ratio: float, is_jpeg: bool) -> _Loading:
    """Return the fastest number of loader processes, with pixels instead of JPEGs if it pays."""
    num_workers = best_num_workers(facts, compute_ratio=ratio)
    plain = _Loading(num_workers, expected_step_ms(facts, num_workers, compute_ratio=ratio))
    saved_ms = facts.loader.read_ms - facts.loader.copy_ms
    if not is_jpeg or saved_ms <= 0:
        return plain
    num_workers = best_num_workers(facts, compute_ratio=ratio, saved_ms=saved_ms)
    step_ms = expected_step_ms(facts, num_workers, compute_ratio=ratio, saved_ms=saved_ms)
    return _Loading(num_workers, step_ms, saved_ms) if plain.step_ms / step_ms > MIN_GAIN else plain


def _should_change_workers(facts: Facts, loading: _Loading, ratio: float) -> bool:
    if loading.num_workers == facts.num_workers:
        return False
    if loading.saved_ms:
        return True
    unchanged_ms = facts.step_ms
    if facts.num_workers in facts.loader.batch_ms:
        unchanged_ms = expected_step_ms(facts, facts.num_workers, compute_ratio=ratio)
    return unchanged_ms / loading.step_ms > MIN_GAIN


def _workers_reason(facts: Facts, num_workers: int) -> str:
    batch_ms = facts.loader.batch_ms[num_workers]
    if num_workers == 0:
        return (
            f"no loader processes: a batch takes {batch_ms:.1f} ms in the trainer, less than "
            "receiving one"
        )
    return (
        f"{num_workers} loader process{'es' * (num_workers > 1)}: a batch every {batch_ms:.1f} ms, "
        "made while the step computes"
    )
