"""Drawn rows of classes, and how often they are resampled."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from slipway.metrics.scores import Resampling, measure

FEW = Resampling(
    seed=1, num_samples=40, confidence=0.95
)  # with so many one has rows of two classes
TWO = Resampling(seed=1, num_samples=2, confidence=0.95)
THOUSAND = Resampling(seed=1, num_samples=1000, confidence=0.95)
classification_metrics = partial(measure, "image_classification")
regression_metrics = partial(measure, "image_regression")


def one_hot(labels: list[int], num_classes: int) -> NDArray[np.float64]:
    return np.eye(num_classes)[labels]


def random_case(generator: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """1 to 59 rows of 1 to 12 classes, often with unused classes and equal probabilities."""
    num_rows, num_classes = int(generator.integers(1, 60)), int(generator.integers(1, 13))
    present = generator.choice(
        num_classes, size=int(generator.integers(1, num_classes + 1)), replace=False
    )
    targets = generator.choice(present, size=num_rows)
    if generator.random() < 0.3:
        return targets, generator.multinomial(
            4, np.full(num_classes, 1 / num_classes), size=num_rows
        ) / 4
    return targets, generator.dirichlet(np.full(num_classes, 0.3), size=num_rows)
