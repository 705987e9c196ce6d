"""API keys whose labels contradict the model more often than those of the other keys.

A shift of the traffic raises the errors for all keys. A key with wrong labels, or with traffic of
its own, stands out: its errors are compared with those of the other keys by the Mann-Whitney test.
For labels, which are right or wrong, this compares two fractions.
"""

import math
from collections.abc import Mapping, Sequence

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
    """Return the keys that stand out, the worst first.

    Keys are removed one by one, so that one key with many wrong labels hides no other.
    """
    errors = {key: values for key, values in _errors(labels).items() if key not in trusted}
    reference = {key: values for key, values in _errors(labels).items() if key in trusted}
    found: list[KeyRecord] = []
    while records := [
        record for key in errors if (record := _compared(key, errors, reference)) is not None
    ]:
        worst = max(records, key=lambda record: record.z)
        found.append(worst)
        del errors[worst.key]
    return found


def key_name(caller: str | None) -> str:
    """Return the name of a key for people."""
    return caller or NO_KEY


def _errors(labels: Sequence[JoinedLabel]) -> dict[str, NDArray[np.float64]]:
    """Return the errors (N,) of the model by each key's labels."""
    found: dict[str, list[float]] = {}
    for label in labels:
        if isinstance(label.truth, str) or isinstance(label.predicted, str):
            error = float(label.truth != label.predicted)
        else:
            error = abs(label.truth - label.predicted)
        found.setdefault(key_name(label.caller), []).append(error)
    return {key: np.array(values) for key, values in found.items()}


def _compared(
    key: str,
    errors: Mapping[str, NDArray[np.float64]],
    reference: Mapping[str, NDArray[np.float64]],
) -> KeyRecord | None:
    """Compare a key with all others; None if it does not stand out, or for too few labels."""
    own = errors[key]
    rest = [values for name, values in {**errors, **reference}.items() if name != key]
    others = np.concatenate(rest) if rest else np.zeros(0)
    if min(len(own), len(others)) < MIN_LABELS:
        return None
    ordered = np.sort(others)
    below = np.searchsorted(ordered, own, side="left")
    equal = np.searchsorted(ordered, own, side="right") - below
    gain = float((below + equal / 2).sum()) / (len(own) * len(others)) - 0.5
    _, ties = np.unique(np.concatenate([own, others]), return_counts=True)
    total = len(own) + len(others)
    spread = total + 1 - float((ties.astype(np.float64) ** 3 - ties).sum()) / (total * (total - 1))
    deviation = math.sqrt(spread / (12 * len(own) * len(others)))
    z = gain / deviation if deviation else 0.0
    if gain < _MIN_GAIN or z < _MIN_Z:
        return None
    return KeyRecord(
        key=key,
        labels=len(own),
        errors=float(own.mean()),
        others=float(others.mean()),
        z=round(z, 2),
    )
