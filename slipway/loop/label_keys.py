"""Finds API keys whose labels contradict the model more often than the labels of other keys.

A shift of the traffic raises the error for all keys. A key with wrong labels, or with different
traffic, stands out. The Mann-Whitney test compares its errors with those of the other keys at the
same time. The error of a class is 0 or 1, so for classes the test compares two fractions.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.system.contract import Contract
from slipway.traffic.monitoring_records import JoinedLabel

NO_KEY = "no key"  # the name for labels that came without an API key
MIN_LABELS = 30  # needed from the key, and from all other keys together
_MIN_Z = 4.5  # one-sided bound; an honest key reaches it once in 300,000 tests
# Smallest excess over 1/2 of the probability that an error of the key is larger than an error of
# the others. For classes 0.05 means an error rate that is ten percentage points higher.
_MIN_GAIN = 0.05
_MOST_PARTS, _PART_LABELS = 20, 50  # the labels are divided by time into parts of equal size


class KeyRecord(Contract):
    """A key's labels compared with those of all other keys."""

    key: str
    labels: int
    errors: float  # classes: fraction of contradicted answers; numbers: mean absolute error
    others: float  # the same for the labels of the other keys
    z: float  # test statistic, standard normal for an honest key; positive: larger errors

    @property
    def text(self) -> str:
        """The record in one line, for messages."""
        return (
            f"{self.key}: its {self.labels} labels contradict the model by {self.errors:.3g}, "
            f"those of the other keys by {self.others:.3g} (z = {self.z:.1f})"
        )


def suspicious_keys(labels: Sequence[JoinedLabel], trusted: Sequence[str] = ()) -> list[KeyRecord]:
    """Return the keys whose labels contradict the model more often than others, the worst first.

    Leaves out labels of rows that the label queue chose, because the model errs more often there.
    Keys in `trusted` are compared with, but never returned.
    """
    labels = [label for label in labels if not label.is_chosen]
    errors = [_error(label) for label in labels]
    names = [key_name(label.caller) for label in labels]
    return keys_that_stand_out(errors, names, [label.answered for label in labels], trusted)


def keys_that_stand_out(
    errors: Sequence[float] | NDArray[np.float64],
    names: Sequence[str],
    times: Sequence[float] | NDArray[np.float64],
    trusted: Sequence[str] = (),
) -> list[KeyRecord]:
    """Return the keys with larger errors than the others at the same time, the worst first.

    Each key found is left out of the further comparisons, so that a key with many wrong labels
    hides no other. `errors`, `names` and `times` have one entry for each of N labels.
    """
    values, keys = np.asarray(errors, np.float64), np.array(names, object)
    num_parts = max(1, min(_MOST_PARTS, len(values) // _PART_LABELS))
    moments = np.asarray(times, np.float64)
    edges = np.quantile(moments, np.arange(1, num_parts) / num_parts) if len(moments) else moments
    strata = np.searchsorted(np.unique(edges), moments, side="right")
    is_used, found = np.ones(len(values), bool), list[KeyRecord]()
    while True:
        compared = [
            _compared(key, values[is_used], keys[is_used], strata[is_used])
            for key in sorted(set(keys[is_used]) - set(trusted))
        ]
        records = [record for record in compared if record]
        if not records:
            return found
        found.append(max(records, key=lambda record: record.z))
        is_used &= keys != found[-1].key


def key_name(caller: str | None) -> str:
    """Return the name of a key for messages; NO_KEY if there is none."""
    return caller or NO_KEY


def _error(label: JoinedLabel) -> float:
    """Return the model's error according to one label: 0 or 1 for classes, else |y - y'|."""
    if isinstance(label.truth, str) or isinstance(label.predicted, str):
        return float(label.truth != label.predicted)
    return abs(label.truth - label.predicted)


def _compared(
    key: str,
    errors: NDArray[np.float64],
    keys: NDArray[np.object_],
    strata: NDArray[np.int64],
) -> KeyRecord | None:
    """Compare a key with all others; None if it does not stand out or has too few labels.

    `strata` holds the number of each label's part of the time. The Mann-Whitney statistics of the
    parts are added (van Elteren's test, weighted by numbers of pairs), so a key that appeared after
    a shift is only compared with labels after the shift.
    """
    is_own = keys == key
    gain = variance = pairs = 0.0
    counts, sums = [0, 0], [0.0, 0.0]
    for part in np.unique(strata[is_own]):
        own, others = (errors[(strata == part) & side] for side in (is_own, ~is_own))
        if not len(others):
            continue
        ordered, total = np.sort(others), len(own) + len(others)
        below = np.searchsorted(ordered, own, side="left")
        equal = np.searchsorted(ordered, own, side="right") - below
        num_pairs = len(own) * len(others)
        _, ties = np.unique(np.concatenate([own, others]), return_counts=True)
        tied = float((ties.astype(np.float64) ** 3 - ties).sum()) / (total * (total - 1))
        gain += float((below + equal / 2).sum()) - num_pairs / 2
        variance += num_pairs * (total + 1 - tied) / 12
        pairs += num_pairs
        for side, values in enumerate((own, others)):
            counts[side] += len(values)
            sums[side] += float(values.sum())
    if min(counts) < MIN_LABELS or variance <= 0:
        return None
    z = gain / math.sqrt(variance)
    if gain / pairs < _MIN_GAIN or z < _MIN_Z:
        return None
    return KeyRecord(
        key=key,
        labels=counts[0],
        errors=sums[0] / counts[0],
        others=sums[1] / counts[1],
        z=round(z, 2),
    )
