"""The learning-rate range test of Smith (arXiv 1506.01186), with the rate raised exponentially and the loss smoothed.

The rate goes from far too small to far too large within some steps of real training. The loss first stays, then falls, then rises;
a good peak lies well before the rise. Ten times below the lowest point is proposed, as fastai does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipway.system.errors import TrainingError

_SMOOTHING = (
    0.9  # of the moving average, freed of its start as Adam's are (arXiv 1412.6980, section 3)
)
_DIVERGED = 3.0  # times the lowest smoothed loss
_FEWEST_POINTS = 10
_BELOW_LOWEST = 10.0


@dataclass(frozen=True)
class RangeTest:
    """A curve: the rate of each step, its loss, and the smoothed loss."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]

    @property
    def lowest(self) -> float:
        """The rate at which the smoothed loss was lowest."""
        return self.rates[min(range(len(self.rates)), key=self.smoothed.__getitem__)]

    @property
    def proposed(self) -> float:
        """A peak for warm-up and cosine, to two digits."""
        return float(f"{self.lowest / _BELOW_LOWEST:.1e}")


def rate_at(index: int, num_steps: int, lowest: float, highest: float) -> float:
    """Of step `index` of `num_steps`: from `lowest` to `highest` in equal ratios."""
    return float(lowest * (highest / lowest) ** (index / max(1, num_steps - 1)))


def run_range_test(
    step: Callable[[int, float], float], num_steps: int, lowest: float, highest: float
) -> RangeTest:
    """`step(index, rate)` trains one step and returns its loss, or raises TrainingError where it is not finite.

    Ends early where the loss has clearly diverged. TrainingError where the curve says nothing: too short, or the loss never fell.
    """
    rates: list[float] = []
    losses: list[float] = []
    smoothed: list[float] = []
    for index in range(num_steps):
        rate = rate_at(index, num_steps, lowest, highest)
        try:
            loss = step(index, rate)
        except TrainingError:
            break
        if not math.isfinite(loss):
            break
        rates.append(rate)
        losses.append(loss)
        smoothed.append(_smooth(losses))
        if len(rates) > _FEWEST_POINTS and smoothed[-1] > _DIVERGED * min(smoothed):
            break
    found = RangeTest(rates, losses, smoothed)
    _check(found, num_steps)
    return found


def _smooth(losses: Sequence[float]) -> float:
    """The exponentially weighted mean of all losses so far."""
    weights = [_SMOOTHING ** (len(losses) - 1 - place) for place in range(len(losses))]
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)


def _check(found: RangeTest, num_steps: int) -> None:
    if len(found.rates) < _FEWEST_POINTS:
        raise TrainingError(
            f"the loss was not finite after {len(found.rates)} of {num_steps} steps of the range test, expected at least {_FEWEST_POINTS}. "
            "Begin lower (--from), or look at the data."
        )
    if found.lowest <= found.rates[_FEWEST_POINTS - 1]:
        raise TrainingError(
            f"the loss did not fall at any learning rate between {found.rates[0]:g} and {found.rates[-1]:g}. "
            "Begin lower (--from), take more steps (--steps), or look at the data."
        )
