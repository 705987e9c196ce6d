"""Members of an ensemble on the test rows: gains with paired intervals, and disputed rows."""

import numpy as np
import pytest
from numpy.typing import NDArray

from slipway.metrics.scores import Resampling
from slipway.reports.evaluation.members import (
    EnsembleAnswers,
    MemberAnswers,
    MemberComparison,
    Speed,
    StudentAnswers,
    compare_members,
)
from slipway.reports.evaluation.slice_scores import RowAnswers
from slipway.reports.pages.sections.members import members_section

RESAMPLING = Resampling(3, 300, 0.95)
NUM_ROWS = 400
DRAWN = np.random.default_rng(0)
TARGETS = DRAWN.normal(size=NUM_ROWS) * 10


def compared(
    errors: list[NDArray[np.float64]], losses: list[float], student: StudentAnswers | None = None
) -> MemberComparison:
    """Members with these errors, and their mean as the ensemble."""
    outputs = [(TARGETS + error)[:, None].astype(np.float32) for error in errors]
    members = [
        MemberAnswers(f"{place}", 1 / len(outputs), loss, 1000, own, speed(2.0))
        for place, (own, loss) in enumerate(zip(outputs, losses, strict=True))
    ]
    whole = np.stack(outputs).mean(axis=0)
    answers = RowAnswers("table_regression", TARGETS, whole)
    if student and student.is_served:
        answers = RowAnswers("table_regression", TARGETS, student.outputs)
    return compare_members(answers, EnsembleAnswers(members, speed(8.0), student), RESAMPLING)


def speed(latency_ms: float) -> Speed:
    return Speed(latency_ms=latency_ms, rows_per_second=20_000 / latency_ms)


ERRORS = [DRAWN.normal(size=NUM_ROWS) for _ in range(4)]


def student_with(error: NDArray[np.float64], *, is_served: bool = False) -> StudentAnswers:
    """A student with this error, beside the mean of ERRORS."""
    whole = np.stack([(TARGETS + one)[:, None].astype(np.float32) for one in ERRORS]).mean(axis=0)
    return StudentAnswers(
        "student",
        is_served,
        500,
        (TARGETS + error)[:, None].astype(np.float32),
        whole,
        speed(2.2),
    )


@pytest.mark.parametrize("is_served", [False, True])
def test_a_student_is_judged_by_the_part_of_the_gain_that_it_keeps(is_served: bool) -> None:
    losses = [0.4, 0.1, 0.2, 0.3]
    same = compared(ERRORS, losses, student_with(np.mean(ERRORS, axis=0), is_served=is_served))
    assert same.student is not None
    assert same.student.kept == pytest.approx(1, abs=1e-3)
    assert same.student.gain == same.members[0].gain.model_copy(
        update={
            "value": pytest.approx(same.members[0].gain.value, abs=1e-3),
            "low": pytest.approx(same.members[0].gain.low, abs=1e-3),
            "high": pytest.approx(same.members[0].gain.high, abs=1e-3),
        }
    )
    assert "keeps 100% of the ensemble's gain at 1.1x the latency of 1" in same.student_text(
        same.student
    )
    poor = compared(ERRORS, losses, student_with(ERRORS[1], is_served=is_served))
    assert poor.student is not None
    assert poor.student.kept == pytest.approx(0, abs=1e-3)
    assert "less than the 80% to expect" in poor.student_text(poor.student)
    assert poor.ensemble == same.ensemble


def test_a_student_keeps_no_fraction_of_an_ensemble_without_gain() -> None:
    worse = [ERRORS[0], ERRORS[0] + 5]
    found = compared(worse, [0.1, 0.2], student_with(ERRORS[0]))
    assert found.student is not None
    assert found.student.kept is None
    assert "no gain that a student could keep" in found.student_text(found.student)


def test_the_section_shows_the_student_beside_the_ensemble_and_the_best_member() -> None:
    found = compared(ERRORS, [0.4, 0.1, 0.2, 0.3], student_with(np.mean(ERRORS, axis=0)))
    text = str(members_section(found))
    assert "gain kept" in text
    assert "ensemble, served" in text
    assert "2.2 ms" in text
    assert text.count("<table") == 2


def test_the_section_shows_size_latency_and_throughput_of_each_member_and_the_ensemble() -> None:
    text = str(members_section(compared(ERRORS, [0.4, 0.1, 0.2, 0.3])))
    assert text.count("1.0 kB") == text.count("2 ms") == text.count("10,000") == 4
    assert "8 ms" in text
    assert "2,500" in text


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
