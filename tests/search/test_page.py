"""The page of a search has its winner, its history, every key and every trial with its cause."""

from pathlib import Path
from typing import Any, Literal

import pytest

from slipway.artifacts.bundle import Metric
from slipway.config.params import parse_params
from slipway.planning.search_space import Space, read_space
from slipway.search.journal import JobLine, ResultLine
from slipway.search.optimism import Optimism
from slipway.search.page import importances, latest_results, search_page
from slipway.search.study import Study, open_study
from tests.planning.test_search_space import content

SPACE: dict[str, Any] = {
    "train.learning_rate": {"log_range": [0.001, 0.01]},
    "train.optimizer": {"choice": ["adamw", "sgd"]},
    "train.momentum": {"choice": [0.9], "when": {"train.optimizer": ["sgd"]}},
}
RATES = [0.004, 0.001, 0.002, 0.006, 0.008, 0.01]


@pytest.fixture(name="ended")
def _ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Study, Space]:
    """A search whose score is the learning rate, with a failed and a stopped trial."""
    monkeypatch.chdir(tmp_path)
    found = content(space=SPACE)
    params = parse_params(found).search
    assert params is not None
    study = open_study(None, "search", "digest", params, 30, threads=2)
    for number, rate in enumerate(RATES):
        values = {"train.learning_rate": rate, "train.optimizer": "adamw"}
        study.add_job(
            JobLine(event="job", job=number, trial=number, values=values, level=0, epoch=30)
        )
        status: Literal["failed", "stopped", "done"] = "done"
        if number < 2:
            status = ("failed", "stopped")[number]
        score = None if status == "failed" else rate
        metric = Metric(value=rate, low=rate / 2, high=2 * rate, confidence=0.95, rows=99)
        study.add_result(
            ResultLine(
                event="result",
                job=number,
                trial=number,
                status=status,
                epoch=30 if status == "done" else 3,
                score=score,
                metric=metric if status == "done" else None,
                seconds=7.0,
                cause="out of memory" if status == "failed" else "",
            )
        )
    return study, read_space(found, params)


def test_search_page_shows_the_winner_its_expected_score_and_every_trial(
    ended: tuple[Study, Space],
) -> None:
    study, space = ended
    html = search_page(study, space, Optimism(4, 0.01, 0.0085, 0.008, 0.009))
    assert "search-1-005" in html
    assert "0.0085" in html
    assert html.count("<polyline") == 1 + 5, "the best so far and one per scored trial"
    assert html.count('<circle class="dot') == 5, "the scored trials"
    for part in ("out of memory", "stopped", "momentum", "Importance of the keys"):
        assert part in html


def test_search_page_without_scores_lists_the_causes_of_the_failures(
    ended: tuple[Study, Space],
) -> None:
    study, space = ended
    study.schedule.results = {0: study.schedule.results[0]}
    html = search_page(study, space, None)
    assert "No trial has a score" in html
    assert "out of memory" in html


def test_only_the_key_that_changes_the_score_has_importance(ended: tuple[Study, Space]) -> None:
    study, space = ended
    found = importances(study, space, latest_results(study))
    assert found["train.learning_rate"] > 0.9


def test_search_with_equal_settings_is_reopened_and_another_is_new(
    ended: tuple[Study, Space],
) -> None:
    study, _ = ended
    params = study.schedule.params
    again = open_study(None, "search", "digest", params, 30, threads=2)
    assert again.name == study.name
    assert again.schedule.results == study.schedule.results
    assert open_study(None, "search", "another", params, 30, threads=2).name == "search-2"
