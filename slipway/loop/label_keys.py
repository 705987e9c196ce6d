"""API keys whose labels contradict the model more often than those of the other keys.

A shift of the traffic raises the errors for all keys. A key with wrong labels, or with traffic of
its own, stands out: its errors are compared with those of the other keys at the same time by the
Mann-Whitney test. For labels, which are right or wrong, this compares two fractions.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.system.contract import Contract
from slipway.traffic.monitoring_records import JoinedLabel

NO_KEY = "no key"  # stands for labels that came without one
MIN_LABELS = 30  # of a key, and of all others
_MIN_Z = 4.5  # one-sided; a key like the others reaches it once in 300,000 tests
# Above 1/2: probability that an error of the key is larger than one of the others. For labels it
# means ten points more errors.
_MIN_GAIN = 0.05
_MOST_PARTS, _PART_LABELS = 20, 50  # parts of the time, with as many labels each


class KeyRecord(Contract):
    """The labels of one key, and how they differ from those of the other keys."""

    key: str
    labels: int
    errors: float  # fraction of answers that its labels contradict, or mean distance of numbers
    others: float  # the same for the other keys
    z: float  # standard normal without a difference; above 0: more errors than the others

    @property
    def text(self) -> str:
        """One line for people."""
        return (
            f"{self.key}: its {self.labels} labels contradict the model by {self.errors:.3g}, "
            f"those of the other keys by {self.others:.3g} (z = {self.z:.1f})"
        )


def suspicious_keys(labels: Sequence[JoinedLabel], trusted: Sequence[str] = ()) -> list[KeyRecord]:
    """Return the keys whose labels contradict the model more often than others, the worst first.

    Rows that the label queue chose are not compared: the model is wrong on them more often.
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

    Keys are removed one by one, so that one key with many wrong labels hides no other. All
    arguments but `trusted` have one entry for each of N labels.
    """
    values, keys = np.asarray(errors, np.float64), np.array(names, object)
    num_parts = max(1, min(_MOST_PARTS, len(values) // _PART_LABELS))
    moments = np.asarray(times, np.float64)
    edges = np.quantile(moments, np.arange(1, num_parts) / num_parts) if len(moments) else moments
    strata = np.searchsorted(np.unique(edges), moments, side="right")
    is_used, found = np.ones(len(values), bool), list[KeyRecord]()
    while True:
        records = [
            record
            for key in sorted(set(keys[is_used]) - set(trusted))
            if (record := _compared(key, values[is_used], keys[is_used], strata[is_used]))
        ]
        if not records:
            return found
        found.append(max(records, key=lambda record: record.z))
        is_used &= keys != found[-1].key


def key_name(caller: str | None) -> str:
    """Return the name of a key for people."""
    return caller or NO_KEY


def _error(label: JoinedLabel) -> float:
    """Return the error of the model by one label: 0 or 1, or the distance of two numbers."""
    if isinstance(label.truth, str) or isinstance(label.predicted, str):
        return float(label.truth != label.predicted)
    return abs(label.truth - label.predicted)


def _compared(
    key: str,
    errors: NDArray[np.float64],
    keys: NDArray[np.object_],
    strata: NDArray[np.int64],
) -> KeyRecord | None:
    """Compare a key with all others; None if it does not stand out, or for too few labels.

    The Mann-Whitney statistics of the parts of the time are added (van Elteren's test with the
    numbers of pairs as weights): a key that came after a shift is compared with others after it.
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
