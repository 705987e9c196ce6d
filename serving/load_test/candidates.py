"""Settings that are worth trying, the most promising first: how the cores are shared, and then the largest batch.

Not the full product: batches change little beside the sharing of the cores, so they are tried with the best sharing alone.
"""

from dataclasses import dataclass

from serving.settings import DEFAULT_BATCH_SIZE, Settings

_MAX_WORKERS = 8  # each has its own model
_SMALL_BATCH = 8


@dataclass(frozen=True)
class SettingsCandidate:
    """One choice of the settings that decide what the service carries."""

    workers: int
    num_threads: int
    max_batch_size: int

    def settings(self) -> dict[str, str]:
        """As environment variables."""
        return {f"SLIPWAY_{name.upper()}": str(value) for name, value in vars(self).items()}


def present_candidate(settings: Settings, largest_batch: int) -> SettingsCandidate:
    """What runs as things are; `largest_batch` is the bundle's."""
    size = (
        min(DEFAULT_BATCH_SIZE, largest_batch)
        if settings.max_batch_size == "auto"
        else settings.max_batch_size
    )
    return SettingsCandidate(settings.workers, settings.threads_per_worker(), size)


def sharings(present: SettingsCandidate, cores: int) -> list[SettingsCandidate]:
    """The present one, and others with its batch: one worker with all cores, a worker for each, what lies between."""
    workers = [count for count in (1, min(cores, _MAX_WORKERS), 2, 4) if count <= cores]
    shared = [(count, max(1, cores // count)) for count in workers]
    pairs = [
        (present.workers, present.num_threads),
        *shared,
        (1, max(1, cores // 2)),
    ]  # the last leaves cores to decoding and HTTP
    return [SettingsCandidate(*pair, present.max_batch_size) for pair in dict.fromkeys(pairs)]


def batches(best: SettingsCandidate, largest_batch: int) -> list[SettingsCandidate]:
    """The best sharing with other largest batches: a few rows, all that the bundle takes, one."""
    sizes = dict.fromkeys(
        size
        for size in (_SMALL_BATCH, largest_batch, 1)
        if size <= largest_batch and size != best.max_batch_size
    )
    return [SettingsCandidate(best.workers, best.num_threads, size) for size in sizes]
