"""Which requests are taken in whole: under a load where most would be left out later, most are only counted from the start.

A request that waits for the watching thread keeps its pixels, rows and answers, some ten thousand bytes that the event loop would
otherwise use again at once. What is only counted leaves a few numbers.
"""

import random
from typing import Any, NamedTuple

from numpy.typing import NDArray

from serving.observing import Answered
from slipway.bundle import LoadedBundle

_SPARE = 1.5  # more is taken than there was time for, so that the share finds its way up again
_FEWEST = 64  # rows of a round


class Counted(NamedTuple):
    """What is counted of a row."""

    bundle: LoadedBundle
    variant: str
    label: str | None  # None for a number
    confidence: float  # of the label
    is_outlier: bool
    inputs: NDArray[Any] | None  # (rows, ...) of the whole request with its first row; None for images, and with its other rows


def rows_to_count(answered: Answered) -> list[Counted]:
    """Each row of a request."""
    bundle, variant = answered.bundle, answered.execution.variant
    inputs = None if bundle.manifest.input.kind == "images" else answered.inputs
    rows = []
    for answer in answered.answers:
        label = answer.get("label")
        confidence = 0.0 if label is None else answer["probabilities"][label]
        rows.append(Counted(bundle, variant, label, confidence, answer["is_outlier"], inputs))
        inputs = None
    return rows


class Thinning:
    """The share of requests that is taken in whole: no more than what the last round had time for, and some."""

    def __init__(self) -> None:
        self._share = 1.0

    def takes(self) -> bool:
        """Whether the next request is taken in whole; at random, whatever it holds."""
        return self._share >= 1.0 or random.random() < self._share

    def adapt(self, num_offered: int, num_used: int) -> None:
        """A round is over, to which so many rows were offered; for so many there was time."""
        self._share = min(1.0, _SPARE * max(num_used, _FEWEST) / num_offered) if num_offered else 1.0
