"""What a step would take with other settings, from what was measured of its parts.

A batch that the trainer makes itself is added to the step. Loader processes make theirs meanwhile: then the slower of the two
decides, but where both want the same cores, never less than all their work over the number of cores.
"""

from dataclasses import dataclass

from slipway.doctor.loader_times import LoaderTimes

NOTHING_GAINED = 1.05  # below it a change is not worth a line in params.yaml


@dataclass(frozen=True)
class Facts:
    """Medians over rounds, in milliseconds for an optimizer step of one process."""

    step_ms: float
    data_ms: float  # of it, waiting for batches
    compute_ms: float  # a step on a batch that is there already
    compute_processor_ms: float  # processor time of such a step, over all threads
    loader: LoaderTimes  # for one batch
    num_workers: int
    num_accumulated: int  # batches in a step
    num_processes: int  # of the training, on this machine
    num_cores: int

    @property
    def data_share(self) -> float:
        """In [0, 1]."""
        return self.data_ms / self.step_ms

    @property
    def loader_waits(self) -> bool:
        """Whether the time for a batch is spent waiting (disk, network) rather than computing."""
        return waits(self.loader.batch_ms[0], self.loader.processor_ms, self.loader.queued_ms)

    @property
    def reading_share(self) -> float:
        """Of the time for a batch, in [0, 1]: reading stored rows, as against changing them."""
        return min(1.0, self.loader.read_ms / self.loader.batch_ms[0])


def waits(wall_ms: float, processor_ms: float, queued_ms: float) -> bool:
    """Whether more than half of a time was neither computing nor standing in line for a core."""
    return wall_ms - processor_ms - queued_ms > 0.5 * wall_ms


def expected_step_ms(
    facts: Facts, num_workers: int, *, compute_ratio: float = 1.0, saved_ms: float = 0.0
) -> float:
    """With so many loader processes, a step's compute `compute_ratio` times as long, and each batch made `saved_ms` sooner."""
    compute = facts.compute_ms * compute_ratio
    if num_workers == 0:
        inline = (
            facts.data_ms
            if facts.num_workers == 0
            else facts.loader.batch_ms[0] * facts.num_accumulated
        )
        return max(0.0, inline - saved_ms * facts.num_accumulated) + compute
    waiting = (
        max(0.0, facts.loader.batch_ms[num_workers] - saved_ms / num_workers)
        * facts.num_accumulated
    )
    work = (
        _processor_ms(facts) - saved_ms
    ) * facts.num_accumulated + facts.compute_processor_ms * compute_ratio
    shared = work * facts.num_processes / facts.num_cores
    return max(waiting, compute + facts.loader.handover_ms * facts.num_accumulated, shared)


def best_num_workers(facts: Facts, *, compute_ratio: float = 1.0, saved_ms: float = 0.0) -> int:
    """The fewest loader processes that come within a twentieth of the shortest step that any number would give."""
    steps = {
        number: expected_step_ms(facts, number, compute_ratio=compute_ratio, saved_ms=saved_ms)
        for number in sorted(facts.loader.batch_ms)
    }
    return next(
        number for number, step in steps.items() if step <= min(steps.values()) * NOTHING_GAINED
    )


def _processor_ms(facts: Facts) -> float:
    """Of one batch made in another process: the batch itself, and sending it."""
    loader = facts.loader
    return loader.processor_ms + max(0.0, loader.batch_ms[1] - loader.batch_ms[0])
