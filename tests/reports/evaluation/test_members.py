"""Members of an ensemble on the test rows: gains with paired intervals, and disputed rows."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.members import MemberAnswers, MemberComparison, compare_members
from slipway.reports.evaluation.slice_scores import RowAnswers
from slipway.reports.pages.sections.members import members_section

RESAMPLING = Resampling(3, 300, 0.95)
NUM_ROWS = 400
DRAWN = np.random.default_rng(0)
TARGETS = DRAWN.normal(size=NUM_ROWS) * 10


def compared(errors: list[NDArray[np.float64]], losses: list[float]) -> MemberComparison:
    """Members with these errors, and their mean as the ensemble."""
    outputs = [(TARGETS + error)[:, None].astype(np.float32) for error in errors]
    members = [
        MemberAnswers(f"{place}", 1 / len(outputs), loss, 1000, own)
        for place, (own, loss) in enumerate(zip(outputs, losses, strict=True))
    ]
    whole = np.stack(outputs).mean(axis=0)
    return compare_members(RowAnswers("table_regression", TARGETS, whole), members, RESAMPLING)


def test_independent_errors_give_a_gain_beyond_noise() -> None:
    found = compared([DRAWN.normal(size=NUM_ROWS) for _ in range(4)], [0.4, 0.1, 0.2, 0.3])
    assert [score.name for score in found.members] == ["1", "2", "3", "0"]
    assert found.members[0].gain.low > 0
    assert found.members[0].measured - found.ensemble == pytest.approx(found.members[0].gain.value)
    assert "the ensemble is better" in found.gain_text()


def test_a_member_that_is_as_good_is_within_noise_and_a_better_one_is_named() -> None:
    error = DRAWN.normal(size=NUM_ROWS)
    similar = compared([error, error + DRAWN.normal(size=NUM_ROWS) * 1e-3], [0.1, 0.2])
    assert "within noise" in similar.gain_text()
    spoilt = compared([error, error + 5], [0.1, 0.2])
    assert spoilt.members[0].verdict == "the ensemble is worse"


def test_rows_that_members_dispute_are_harder() -> None:
    scale = np.where(np.arange(NUM_ROWS) < 40, 8.0, 0.5)
    found = compared([DRAWN.normal(size=NUM_ROWS) * scale for _ in range(3)], [0.1, 0.2, 0.3])
    assert found.dispute is not None
    assert found.dispute.disputed.rows == 40
    assert found.dispute.disputed.low > found.dispute.others.high


def test_the_section_shows_each_member_and_the_ensemble() -> None:
    found = compared([DRAWN.normal(size=NUM_ROWS) for _ in range(2)], [0.1, 0.2])
    text = str(members_section(found))
    assert text.count("<tr") == 1 + 2 + 1
    assert "2.0 kB" in text
