"""Searches for the highest sustained rate: brackets it by factors, then bisects on a log scale.

A service "holds" a rate if it meets the latency goal at this rate, and "misses" it otherwise.
Machines stall now and then, so a rate counts as missed only after two misses. A service may miss a
rate and hold a higher one, so a rate counts as sustained only if it lies below every missed rate.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

RESOLUTION = 1.05  # between neighbouring rates
_STEP_UP, _STEP_DOWN = 1.5, 2.0
LOWEST = RESOLUTION**-14  # requests a second: about one in two seconds


class LoadTrial(NamedTuple):
    """A tried rate, and True if the service met the latency goal at this rate."""

    rate: float  # requests a second
    holds: bool


def lowest_missed(trials: Sequence[LoadTrial]) -> float | None:
    """Return the lowest rate that was missed at least twice and more often than held, or None."""
    held, missed = _counted(trials)
    return min(
        (rate for rate, count in missed.items() if count >= 2 and count > held[rate]), default=None
    )


def carried(trials: Sequence[LoadTrial]) -> float | None:
    """Return the sustained rate: the highest held rate below every missed rate.

    Returns None without one.
    """
    missed = lowest_missed(trials)
    return max(
        (trial.rate for trial in trials if trial.holds and (missed is None or trial.rate < missed)),
        default=None,
    )


def on_grid(rate: float) -> float:
    """Round a rate to a power of RESOLUTION, so that all candidates are measured at equal rates."""
    return float(RESOLUTION ** round(math.log(rate) / math.log(RESOLUTION)))


def next_rate(trials: Sequence[LoadTrial], guess: float) -> float | None:
    """Return the next rate to try, in requests per second; None if the search is over.

    The first rate is about `guess`.
    """
    guess = on_grid(max(guess, LOWEST))
    if not trials:
        return guess
    if not trials[-1].holds and _is_undecided(trials, trials[-1].rate):
        return trials[-1].rate
    held, missed = carried(trials), lowest_missed(trials)
    if missed is None:
        higher = on_grid((held or LOWEST) * _STEP_UP)
        return max(guess, higher) if len(trials) == 1 else higher
    if held is None:
        lower = guess if guess < missed else max(on_grid(missed / _STEP_DOWN), LOWEST)
        return lower if lower < missed else None
    middle = on_grid(math.sqrt(held * missed))
    return middle if held < middle < missed else None


def _is_undecided(trials: Sequence[LoadTrial], rate: float) -> bool:
    """Return True for a rate that was missed once and never held."""
    held, missed = _counted(trials)
    return missed[rate] == 1 and not held[rate]


def _counted(trials: Sequence[LoadTrial]) -> tuple[Counter[float], Counter[float]]:
    held = Counter(trial.rate for trial in trials if trial.holds)
    return held, Counter(trial.rate for trial in trials if not trial.holds)
