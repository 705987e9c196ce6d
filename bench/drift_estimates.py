"""Part of bench/drift_laws.py: the error of the quality estimate, for drawn and real rows."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.drift_images import CIFAR10, divided, read_images, table
from slipway.drift.quality_estimate import Estimate, estimate_quality
from slipway.drift.window import Window
from tests.drift.populations import Population, accuracy, reference_of, window_of

WINDOW_ROWS, NUM_DIVISIONS = 5000, 10


class Estimates:
    """Estimates for one kind of window, compared with the true values."""

    def __init__(self) -> None:
        self.differences: list[float] = []
        self.halves: list[float] = []
        self.labels: list[float] = []
        self.num_held, self.num_valid, self.num_valid_near = 0, 0, 0

    def add(self, estimate: Estimate, truth: float) -> None:
        assert estimate.value is not None
        assert estimate.low is not None
        assert estimate.high is not None
        self.differences.append(abs(estimate.value - truth))
        self.halves.append((estimate.high - estimate.low) / 2)
        self.labels.append(truth)
        self.num_held += estimate.low <= truth <= estimate.high
        self.num_valid += estimate.valid
        self.num_valid_near += estimate.valid and self.differences[-1] <= 0.02

    def line(self, kind: str) -> list[object]:
        found, count = np.array(self.differences), len(self.differences)
        near = f"{self.num_valid_near / self.num_valid:.0%}" if self.num_valid else "-"
        shares = [
            f"{(found <= 0.02).mean():.0%}",
            f"{np.mean(self.halves):.1%}",
            f"{self.num_held / count:.0%}",
        ]
        return [kind, count, f"{found.mean():.2%}", *shares, f"{self.num_valid / count:.0%}", near]


def estimates_of_populations(share: int) -> Iterator[list[object]]:
    """Measure estimates on calibrated simulated rows, with other fractions of hard rows."""
    random = np.random.default_rng(7)
    for num_reference in (300, 1000, 6000):
        for hardness in (0.0, 0.5, 0.9):
            found = Estimates()
            for _ in range(max(20, 300 // share)):
                reference = reference_of(Population(hardness=0.2).draw(random, num_reference))
                rows = Population(hardness=hardness).draw(random, WINDOW_ROWS)
                found.add(estimate_quality(reference, window_of(reference, rows)), accuracy(rows))
            yield found.line(f"drawn, hard rows 20 % -> {hardness:.0%}, {num_reference} labels")


TILTS = (
    ("contrast", -1),
    ("contrast", 1),
    ("brightness", 1),
    ("sharpness", 1),
    ("confidence", -1),
    ("ood_score", -1),
    ("ood_score", 1),
)


def estimates_of_images(name: str, path: Path, share: int) -> Iterator[list[object]]:
    """Measure estimates on real images with changed class fractions.

    Each round divides the rows again, because otherwise all windows would share one error. No image
    appears twice in a window, because that would lower the noise of its labels.
    """
    random = np.random.default_rng(8)
    pixels, labels = read_images(path, 32, 3, 50000)
    found, before = {tilt: Estimates() for tilt in TILTS}, []
    for _ in range(NUM_DIVISIONS):
        order = random.permutation(len(pixels))
        data = divided(pixels[order], [labels[row] for row in order], 0.35)
        features = data.features(data.pixels)
        is_right = data.model.answer(data.pixels).outputs.argmax(axis=1) == data.targets
        before.append(float(is_right.mean()))
        for (feature, sign), own in found.items():
            ranks = features[:, data.reference.column(feature)].argsort().argsort() / len(features)
            weights = np.exp(3 * sign * ranks)
            for _ in range(max(2, 300 // NUM_DIVISIONS // share)):
                rows = random.choice(
                    len(features),
                    size=WINDOW_ROWS,
                    replace=False,
                    p=weights / weights.sum(),
                )
                window = Window(data.reference)
                window.add(features[rows])
                own.add(estimate_quality(data.reference, window), float(is_right[rows].mean()))
    for (feature, sign), own in found.items():
        yield own.line(
            f"{name}, {'more' if sign > 0 else 'less'} {feature}: {np.mean(before):.1%} -> "
            f"{np.mean(own.labels):.1%}"
        )


def estimates(share: int) -> str:
    lines = [*estimates_of_populations(share)]
    if CIFAR10.exists():
        lines += estimates_of_images("CIFAR-10, 7500 labels", CIFAR10, share)
    header = [
        "rows",
        "windows of 5,000",
        "mean difference",
        "within 2 points",
        "half of the interval",
        "truth inside it",
        "marked valid",
    ]
    return table([*header, "of these within 2 points"], lines)
