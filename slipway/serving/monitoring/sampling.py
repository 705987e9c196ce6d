"""Samples requests under load: some are monitored in full, the others are only counted.

A request that waits for the monitoring thread holds its pixels, rows and predictions: some ten
thousand bytes that the event loop would otherwise reuse at once. A counted request only leaves a
few numbers.
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

from slipway.artifacts.bundle import LoadedBundle
from slipway.inputs.columns import ColumnContract
from slipway.predictor.model import AnsweredRow, Counted
from slipway.serving.models.observers import Noted, inputs_of, rows_of
from slipway.serving.monitoring.metrics import CONFIDENCES

_SPARE = 1.5  # sample more than there was time for, so that the rate can rise again
_MIN_ROWS = 16  # fewest rows per round
_COUNTED_AT_ONCE = 512  # most rows that are counted at once
_BOUNDS = np.array(CONFIDENCES)
_NO_BUCKETS = (0,) * (len(CONFIDENCES) + 1)

_counted: Callable[[AnsweredRow], Counted] = attrgetter("counted")
Request = TypeVar("Request")


class RowCounts:
    """Counts of all rows that one model predicted: labels, confidences, OOD rows."""

    __slots__ = (
        "bundle",
        "confidence_sum",
        "confidences",
        "has_columns",
        "has_labels",
        "inputs",
        "labels",
        "num_ood",
        "num_rows",
        "variant",
    )

    def __init__(self, bundle: LoadedBundle, variant: str) -> None:
        self.bundle, self.variant = bundle, variant
        self.has_columns = isinstance(bundle.manifest.input, ColumnContract)
        self.has_labels = bundle.manifest.output.kind == "probabilities"
        self.num_rows = self.num_ood = 0
        self.labels: Counter[str] = Counter()
        self.confidences = list(_NO_BUCKETS)  # counts by the bounds of CONFIDENCES
        self.confidence_sum = 0.0
        self.inputs: deque[NDArray[Any]] = deque()  # (rows, width) of each request; tables only

    def add(self, rows: Sequence[Counted]) -> None:
        """Add rows to the counts, without keeping their inputs."""
        if not rows:
            return
        labels, confidences, are_ood = zip(*rows, strict=True)
        self.num_ood += are_ood.count(True)
        if self.has_labels:
            self.labels.update(labels)
            probabilities = np.array(confidences)
            buckets = np.bincount(_BOUNDS.searchsorted(probabilities)).tolist()
            for bucket, count in enumerate(buckets):
                self.confidences[bucket] += count
            self.confidence_sum += float(probabilities.sum())
        self.num_rows += len(rows)  # last: a larger number announces the rest to the other thread

    def add_inputs(self, answered: Sequence[Noted]) -> None:
        """Store inputs of a table model, whose missing values are counted later."""
        if self.has_columns:
            self.inputs.extend(map(inputs_of, answered))

    def include(
        self,
        labels: dict[str, int],
        confidences: Sequence[int],
        confidence_sum: float,
        num_ood: int,
        num_rows: int,
    ) -> None:
        """Add counts from elsewhere: rows by label and by confidence, but no inputs."""
        self.labels.update(labels)
        self.confidences = [
            mine + its for mine, its in zip(self.confidences, confidences, strict=True)
        ]
        self.confidence_sum += confidence_sum
        self.num_ood += num_ood
        self.num_rows += num_rows


def counted(answered: Iterable[Noted]) -> Iterator[Counted]:
    """Yield the label, confidence and OOD verdict of each row."""
    return map(_counted, chain.from_iterable(map(rows_of, answered)))


class RunningCounts:
    """Counts that the event loop increases while the monitoring thread reads them.

    Nothing is ever reset, so no row is counted twice or lost. Rows are counted in blocks, in a
    fraction of the time of counting each one separately. Either thread may count a block; each row
    leaves the queue once. All other data of a request is released at once.
    """

    def __init__(self, bundle: LoadedBundle, variant: str) -> None:
        self.totals = RowCounts(bundle, variant)
        self._waiting: deque[Counted] = deque()
        self._labels: dict[str, int] = {}  # values at the last reading, like the next four
        self._confidences: Sequence[int] = _NO_BUCKETS
        self._confidence_sum, self._num_ood, self._num_rows = 0.0, 0, 0
        self._num_direct = 0  # rows that the monitoring thread counted, which are not in the totals
        self._num_seen = 0  # rows at the last call of `was_added_to`

    def add(self, answered: Sequence[Noted]) -> None:
        """Count requests. Called on the event loop."""
        self.totals.add_inputs(answered)
        self._waiting.extend(counted(answered))
        if len(self._waiting) >= _COUNTED_AT_ONCE:
            self._count_into(self.totals)

    @property
    def is_new(self) -> bool:
        """True if rows were added since `move_to`."""
        return self.totals.num_rows > self._num_rows or bool(self._waiting)

    def was_added_to(self) -> bool:
        """Return True if rows were added since the last call of this method."""
        num_rows = self.totals.num_rows + self._num_direct + len(self._waiting)
        num_seen, self._num_seen = self._num_seen, num_rows
        return num_rows > num_seen

    def move_to(self, counts: RowCounts) -> None:
        """Add the rows counted since the last call to `counts`.

        Called on the monitoring thread.
        """
        totals = self.totals
        labels, confidences = dict(totals.labels), tuple(totals.confidences)
        confidence_sum, num_ood = totals.confidence_sum, totals.num_ood
        num_rows = totals.num_rows
        new_labels = {
            label: count - self._labels.get(label, 0)
            for label, count in labels.items()
            if count != self._labels.get(label)
        }
        counts.include(
            new_labels,
            [now - before for now, before in zip(confidences, self._confidences, strict=True)],
            confidence_sum - self._confidence_sum,
            num_ood - self._num_ood,
            num_rows - self._num_rows,
        )
        counts.inputs.extend(totals.inputs.popleft() for _ in range(len(totals.inputs)))
        self._labels, self._confidences = labels, confidences
        self._confidence_sum, self._num_ood = confidence_sum, num_ood
        self._num_rows = num_rows
        num_before = counts.num_rows
        self._count_into(counts)
        self._num_direct += counts.num_rows - num_before

    def _count_into(self, counts: RowCounts) -> None:
        taken: list[Counted] = []
        with suppress(IndexError):  # the queue is empty; the other thread may have emptied it
            taken.extend(iter(self._waiting.popleft, None))
        counts.add(taken)


class RequestSampler:
    """Samples requests at a rate slightly above the capacity of the last round."""

    def __init__(self) -> None:
        self._rate = 1.0
        self._num_before = 0  # requests to skip before the next sampled one

    def divide(self, requests: Sequence[Request]) -> tuple[Sequence[Request], Sequence[Request]]:
        """Return the sampled requests, drawn regardless of their content, and the others."""
        if self._rate >= 1.0:
            return requests, ()
        places, place = [], self._num_before
        while place < len(requests):
            places.append(place)
            place += 1 + self._draw_gap()
        self._num_before = place - len(requests)
        others = list(requests)
        return [others.pop(place) for place in reversed(places)], others

    def adapt(self, num_offered: int, num_used: int) -> None:
        """Set the sampling rate after a round: `num_used` of `num_offered` rows were processed."""
        if num_offered:
            self._rate = min(1.0, _SPARE * max(num_used, _MIN_ROWS) / num_offered)
        else:
            self._rate = 1.0
        self._num_before = self._draw_gap()

    def _draw_gap(self) -> int:
        """Return a random number of requests to skip, as if each request were drawn separately."""
        rate = self._rate  # the monitoring thread may change it meanwhile
        if rate >= 1.0:
            return 0
        return int(math.log(1 - random.random()) / math.log1p(-rate))
