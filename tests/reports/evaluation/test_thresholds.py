"""Thresholds on the doubt about an answer, and the slider that shows them."""

import json
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest

from slipway.artifacts.uncertainty import Answers
from slipway.reports.evaluation.thresholds import threshold_steps
from slipway.reports.evaluation.uncertainty import UncertaintyReport
from slipway.reports.pages.sections.threshold import threshold_section
from tests.reports.evaluation.test_uncertainty import NUM_ROWS, numbers, worth


@pytest.mark.parametrize("report", [worth(), numbers()])
def test_each_rounded_threshold_leaves_the_number_of_rows_shown_for_it(
    report: UncertaintyReport,
) -> None:
    steps = threshold_steps(report)
    assert 90 <= len(steps) <= 100
    assert steps[-1].rows == NUM_ROWS
    for step in steps:
        threshold = float(f"{step.threshold:.10g}")
        if report.before is None:
            is_left = report.answers.scores <= np.float64(threshold)
        else:
            is_left = report.answers.outputs.max(axis=1) >= np.float64(threshold)
        assert step.rows == is_left.sum()
        name = "mae" if report.before is None else "accuracy"
        error = report.losses[is_left].mean()
        assert step.metrics[name] == pytest.approx(error if name == "mae" else 1 - error)


def test_a_stricter_threshold_answers_fewer_rows_and_more_of_them_are_right() -> None:
    strict, *_, loose = threshold_steps(worth())
    assert strict.rows < loose.rows
    assert strict.threshold > loose.threshold
    assert strict.metrics["accuracy"] > loose.metrics["accuracy"] + 0.2
    assert strict.bounds is not None
    assert strict.bounds[0] < strict.metrics["accuracy"] <= strict.bounds[1]
    scores = threshold_steps(numbers())
    assert scores[0].threshold < scores[-1].threshold


def test_rows_of_equal_confidence_share_one_threshold() -> None:
    report = worth()
    outputs = np.tile(np.array([1.0, 0, 0, 0, 0], np.float32), (NUM_ROWS, 1))
    scores = np.zeros(NUM_ROWS, np.float32)
    for kept in (report, numbers()):
        chosen = report.answers.outputs * 0 + outputs if kept is report else kept.answers.outputs
        steps = threshold_steps(replace(kept, answers=Answers(chosen, scores)))
        assert [step.rows for step in steps] == [NUM_ROWS]


def test_the_slider_has_every_step_and_the_table_stays_without_a_script() -> None:
    text = threshold_section(worth())
    found = re.search(r'data-steps="([^"]+)"', text)
    assert found
    content = json.loads(unescape(found[1]))
    steps = threshold_steps(worth())
    assert [cells[0] for cells in content] == [f"{step.threshold:.10g}" for step in steps]
    points = re.search(r'polyline class="line first" points="([^"]+)"', text)
    assert points
    assert len(points[1].split()) == len(steps)
    without = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert '<div class="control" hidden>' in without
    assert without.count("<tr>") >= 11
    assert "No setting of the service rejects rows" in without


def test_the_slider_names_the_param_of_a_numeric_target() -> None:
    text = unescape(threshold_section(numbers()))
    assert "evaluate.ood_fraction: 0.1" in text
    assert "no row is rejected" in text
    assert "its interval" not in text


def test_the_script_holds_no_text_of_the_data() -> None:
    scripts = {
        re.findall(r"<script>(.*?)</script>", threshold_section(report), re.DOTALL)[0]
        for report in (worth(), worth(too_sure=4), numbers())
    }
    assert len(scripts) == 1
