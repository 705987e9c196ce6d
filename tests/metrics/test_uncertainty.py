"""Fraction of rows flagged as OOD, and rank correlation of OOD scores."""

import numpy as np
import pytest

from slipway.artifacts.uncertainty import Calibration
from slipway.metrics.uncertainty import ood_fraction, score_rank
from tests.calibrations import CALIBRATION

SCORES = np.array([0.1, 0.2, 0.3, 0.9], np.float32)


def test_ood_fraction_counts_rows_above_the_threshold_with_its_interval() -> None:
    found = ood_fraction(SCORES, CALIBRATION, 0.95)
    assert found is not None
    assert (found.value, found.rows) == (0.25, 4)
    assert 0 < found.low < 0.25 < found.high < 1


def test_ood_fraction_is_none_without_a_threshold() -> None:
    none = CALIBRATION.ood.model_copy(update={"threshold": None})
    without: Calibration = CALIBRATION.model_copy(update={"ood": none})
    assert ood_fraction(SCORES, without, 0.95) is None


@pytest.mark.parametrize(
    ("found", "rank"),
    [
        ([1.0, 2.0, 3.0, 400.0], 1.0),  # another scale keeps the order
        ([4.0, 3.0, 2.0, 1.0], -1.0),
        ([2.0, 1.0, 3.0, 4.0], 0.8),  # 1 - 6 * 2 / (4 * 15)
        ([1.0, 1.0, 3.0, 4.0], 0.948683),  # equal ones share a place
        ([1.0, 1.0, 1.0, 1.0], None),
        ([1.0, np.nan, 3.0, 4.0], None),
    ],
)
def test_score_rank_agrees_with_scipys_spearman_correlation(
    found: list[float], rank: float | None
) -> None:
    assert score_rank(np.array(found, np.float32), SCORES) == (
        rank if rank is None else pytest.approx(rank, abs=1e-6)
    )
