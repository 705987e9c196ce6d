"""Predicts the step time with other settings from measurements of its parts.

Without loader processes, the time to make a batch is added to the step. With them, the step takes
as long as the slower of loading and computing. If both compete for cores, a step takes at least
their total processor time divided by the number of cores.
"""

from dataclasses import dataclass

from slipway.profiling.loader_times import LoaderTimes

MIN_GAIN = 1.05  # smallest gain in speed for which a change is proposed


@dataclass(frozen=True)
class Facts:
    """Measured times of a step: medians over rounds, in milliseconds per step of one process."""

    step_ms: float
    data_ms: float  # part of the step that waits for batches
    compute_ms: float  # time of a step whose batch is ready
    compute_processor_ms: float  # processor time of a step whose batch is ready, all threads
    loader: LoaderTimes  # times per batch
    num_workers: int
    num_accumulated: int  # batches per optimizer step
    num_processes: int  # training processes on this machine
    num_cores: int

    @property
    def loader_waits(self) -> bool:
        """True if a batch is made mostly by waiting for a disk or network, not by computing."""
        return waits(self.loader.batch_ms[0], self.loader.processor_ms, self.loader.queued_ms)

    @property
    def reading_fraction(self) -> float:
        """The fraction of the time of a batch that is spent reading stored rows."""
        return min(1.0, self.loader.read_ms / self.loader.batch_ms[0])


def waits(wall_ms: float, processor_ms: float, queued_ms: float) -> bool:
    """Return True if over half of `wall_ms` was spent neither computing nor queueing for a core."""
    return wall_ms - processor_ms - queued_ms > 0.5 * wall_ms


def expected_step_ms(
    facts: Facts, num_workers: int, *, compute_ratio: float = 1.0, saved_ms: float = 0.0
) -> float:
    """Predict the time of a step in milliseconds with other settings.

    Args:
        num_workers: number of loader processes; it must be one of the measured numbers.
        compute_ratio: compute time of a step as a multiple of the current one.
        saved_ms: time saved on each batch.
    """
    loader, num_batches = facts.loader, facts.num_accumulated
    compute_ms = facts.compute_ms * compute_ratio
    if num_workers == 0:
        is_measured = facts.num_workers == 0
        inline_ms = facts.data_ms if is_measured else loader.batch_ms[0] * num_batches
        return max(0.0, inline_ms - saved_ms * num_batches) + compute_ms
    waiting_ms = max(0.0, loader.batch_ms[num_workers] - saved_ms / num_workers) * num_batches
    sending_ms = max(0.0, loader.batch_ms[1] - loader.batch_ms[0])
    work_ms = (loader.processor_ms + sending_ms - saved_ms) * num_batches
    work_ms += facts.compute_processor_ms * compute_ratio
    shared_ms = work_ms * facts.num_processes / facts.num_cores
    return max(waiting_ms, compute_ms + loader.handover_ms * num_batches, shared_ms)


def best_num_workers(facts: Facts, *, compute_ratio: float = 1.0, saved_ms: float = 0.0) -> int:
    """Return the fewest loader processes whose predicted step is within MIN_GAIN of the fastest."""
    steps = {
        number: expected_step_ms(facts, number, compute_ratio=compute_ratio, saved_ms=saved_ms)
        for number in sorted(facts.loader.batch_ms)
    }
    shortest = min(steps.values())
    return next(number for number, step in steps.items() if step <= shortest * MIN_GAIN)
