"""Which requests are taken in whole: under a load where most would be left out later, most are only counted from the start.

A request that waits for the watching thread keeps its pixels, rows and answers, some ten thousand bytes that the event loop would
otherwise use again at once. What is only counted leaves a few numbers.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from serving.models.model import AnsweredRow, Counted
from serving.models.observers import Noted, inputs_of, rows_of
from serving.monitoring.metrics import CONFIDENCES
from slipway.artifacts.bundle import LoadedBundle

_SPARE = 1.5  # more is taken than there was time for, so that the share finds its way up again
_FEWEST = 16  # rows of a round
_AT_ONCE = 512  # rows
_BOUNDS = np.array(CONFIDENCES)
_NO_BUCKETS = (0,) * (len(CONFIDENCES) + 1)

_counted: Callable[[AnsweredRow], Counted] = attrgetter("counted")
Request = TypeVar("Request")


class SampledCounts:
    """What is counted of every row that one model answered."""

    __slots__ = (
        "bundle",
        "confidence_sum",
        "confidences",
        "has_labels",
        "inputs",
        "is_table",
        "labels",
        "num_outliers",
        "num_rows",
        "variant",
    )

    def __init__(self, bundle: LoadedBundle, variant: str) -> None:
        self.bundle, self.variant = bundle, variant
        self.is_table = bundle.manifest.input.kind == "columns"
        self.has_labels = bundle.manifest.output.kind == "probabilities"
        self.num_rows = self.num_outliers = 0
        self.labels: Counter[str] = Counter()
        self.confidences = list(_NO_BUCKETS)  # by the bounds of CONFIDENCES
        self.confidence_sum = 0.0
        self.inputs: deque[NDArray[Any]] = deque()  # (rows, ...) of each request, of tables alone

    def add(self, rows: Sequence[Counted]) -> None:
        """Count rows that this model answered, without their inputs."""
        if not rows:
            return
        labels, confidences, are_outliers = zip(*rows, strict=True)
        self.num_outliers += are_outliers.count(True)
        if self.has_labels:
            self.labels.update(labels)
            probabilities = np.array(confidences)
            for bucket, count in enumerate(
                np.bincount(_BOUNDS.searchsorted(probabilities)).tolist()
            ):
                self.confidences[bucket] += count
            self.confidence_sum += float(probabilities.sum())
        self.num_rows += len(rows)  # the last, since it tells that there is more

    def add_inputs(self, answered: Sequence[Noted]) -> None:
        """Have the inputs of requests, where any of them are counted."""
        if self.is_table:
            self.inputs.extend(map(inputs_of, answered))

    def include(
        self,
        labels: dict[str, int],
        confidences: Sequence[int],
        confidence_sum: float,
        num_outliers: int,
        num_rows: int,
    ) -> None:
        """Add what was counted elsewhere, without its inputs."""
        self.labels.update(labels)
        self.confidences = [
            mine + its for mine, its in zip(self.confidences, confidences, strict=True)
        ]
        self.confidence_sum += confidence_sum
        self.num_outliers += num_outliers
        self.num_rows += num_rows


def counted(answered: Iterable[Noted]) -> Iterator[Counted]:
    """What is counted of each row."""
    return map(_counted, chain.from_iterable(map(rows_of, answered)))


class RunningCounts:
    """Totals that the event loop adds to, and the watching thread reads: nothing is reset, so nothing is counted twice or lost between.

    Rows are counted `_AT_ONCE`, which takes a fraction of what each takes between all else that is done for it; each is taken out of the
    queue by one of the two threads. Nothing else of a request is kept meanwhile: its memory is for the next one, while it is at hand.
    """

    def __init__(self, bundle: LoadedBundle, variant: str) -> None:
        self.totals = SampledCounts(bundle, variant)
        self._waiting: deque[Counted] = deque()
        self._labels: dict[str, int] = {}  # as they were read last
        self._confidences: Sequence[int] = _NO_BUCKETS
        self._confidence_sum, self._num_outliers, self._num_rows = 0.0, 0, 0
        self._num_direct = 0  # rows that were never among the totals
        self._num_seen = 0  # rows when it was last asked whether there are more

    def add(self, answered: Sequence[Noted]) -> None:
        """Take note of requests, on the event loop."""
        self.totals.add_inputs(answered)
        self._waiting.extend(counted(answered))
        if len(self._waiting) >= _AT_ONCE:
            self._count_into(self.totals)

    @property
    def is_new(self) -> bool:
        """Whether rows were added since `move_to`."""
        return self.totals.num_rows > self._num_rows or bool(self._waiting)

    def was_added_to(self) -> bool:
        """Whether there are more rows than when this was last asked."""
        num_seen, self._num_seen = (
            self._num_seen,
            self.totals.num_rows + self._num_direct + len(self._waiting),
        )
        return self._num_seen > num_seen

    def move_to(self, counts: SampledCounts) -> None:
        """Add what is new since the last time to `counts`, on the watching thread."""
        totals = self.totals
        labels, confidences = dict(totals.labels), tuple(totals.confidences)
        confidence_sum, num_outliers, num_rows = (
            totals.confidence_sum,
            totals.num_outliers,
            totals.num_rows,
        )
        counts.include(
            {
                label: count - self._labels.get(label, 0)
                for label, count in labels.items()
                if count != self._labels.get(label)
            },
            [now - before for now, before in zip(confidences, self._confidences, strict=True)],
            confidence_sum - self._confidence_sum,
            num_outliers - self._num_outliers,
            num_rows - self._num_rows,
        )
        counts.inputs.extend(totals.inputs.popleft() for _ in range(len(totals.inputs)))
        self._labels, self._confidences = labels, confidences
        self._confidence_sum, self._num_outliers, self._num_rows = (
            confidence_sum,
            num_outliers,
            num_rows,
        )
        num_before = counts.num_rows
        self._count_into(counts)
        self._num_direct += counts.num_rows - num_before

    def _count_into(self, counts: SampledCounts) -> None:
        taken: list[Counted] = []
        with suppress(IndexError):  # it is empty, which the other thread may have brought about
            taken.extend(iter(self._waiting.popleft, None))
        counts.add(taken)


class Thinning:
    """The share of requests that is taken in whole: no more than what the last round had time for, and some."""

    def __init__(self) -> None:
        self._share = 1.0
        self._num_before = 0  # requests, until the next one that is taken in whole

    def divide(self, requests: Sequence[Request]) -> tuple[Sequence[Request], Sequence[Request]]:
        """Those that are taken in whole, each at random whatever it holds, and the others."""
        if self._share >= 1.0:
            return requests, ()
        places, place = [], self._num_before
        while place < len(requests):
            places.append(place)
            place += 1 + self._draw()
        self._num_before = place - len(requests)
        others = list(requests)
        return [others.pop(place) for place in reversed(places)], others

    def adapt(self, num_offered: int, num_used: int) -> None:
        """A round is over, to which so many rows were offered; for so many there was time."""
        self._share = (
            min(1.0, _SPARE * max(num_used, _FEWEST) / num_offered) if num_offered else 1.0
        )
        self._num_before = self._draw()

    def _draw(self) -> int:
        """How many are left out before the next: by the geometric law, as if each was drawn for itself."""
        share = self._share
        return int(math.log(1 - random.random()) / math.log1p(-share)) if share < 1.0 else 0
