"""Lists the settings to measure, most promising first: workers and threads, then batch size.

Batch sizes matter less than workers and threads, so they are tried only with the best of those.
"""

from dataclasses import dataclass

from slipway.predictor.options import DEFAULT_BATCH_SIZE
from slipway.serving.settings import Settings

_MAX_WORKERS = 8  # each worker holds a model of its own
_SMALL_BATCH = 8


@dataclass(frozen=True)
class SettingsCandidate:
    """Values of the settings that determine capacity: workers, threads and the largest batch."""

    workers: int
    num_threads: int
    max_batch_size: int

    def settings(self) -> dict[str, str]:
        """Return the candidate as environment variables of the service."""
        return {f"SLIPWAY_{name.upper()}": str(value) for name, value in vars(self).items()}


def present_candidate(settings: Settings, largest_batch: int) -> SettingsCandidate:
    """Return the present settings as a candidate.

    `largest_batch` is the largest batch that the bundle supports, in rows.
    """
    size = (
        min(DEFAULT_BATCH_SIZE, largest_batch)
        if settings.max_batch_size == "auto"
        else settings.max_batch_size
    )
    return SettingsCandidate(settings.workers, settings.threads_per_worker(), size)


def sharings(present: SettingsCandidate, cores: int) -> list[SettingsCandidate]:
    """Return candidates that divide the cores among different numbers of workers.

    All have the batch size of `present`, which comes first.
    """
    workers = [count for count in (1, min(cores, _MAX_WORKERS), 2, 4) if count <= cores]
    shared = [(count, max(1, cores // count)) for count in workers]
    pairs = [
        (present.workers, present.num_threads),
        *shared,
        (1, max(1, cores // 2)),  # leaves cores for decoding and HTTP
    ]
    return [SettingsCandidate(*pair, present.max_batch_size) for pair in dict.fromkeys(pairs)]


def batches(best: SettingsCandidate, largest_batch: int) -> list[SettingsCandidate]:
    """Return copies of `best` with other batch sizes: a few rows, the bundle's largest, one row."""
    sizes = dict.fromkeys(
        size
        for size in (_SMALL_BATCH, largest_batch, 1)
        if size <= largest_batch and size != best.max_batch_size
    )
    return [SettingsCandidate(best.workers, best.num_threads, size) for size in sizes]
