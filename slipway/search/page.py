"""The HTML page of a search: history, winner and optimism, importances, trials and cost."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from slipway.config.params import value_at
from slipway.config.yaml_text import as_yaml
from slipway.kinds.registry import kind_of
from slipway.planning.search_space import Space, Values
from slipway.reports.console import interval, number
from slipway.reports.pages.charts import BarGroup, Series, bar_groups, line_chart
from slipway.reports.pages.html_page import (
    Html,
    beside,
    page,
    paragraph,
    section,
    table,
    tiles,
)
from slipway.reports.pages.intervals import IntervalRow, interval_chart
from slipway.search.journal import ResultLine
from slipway.search.optimism import Optimism, expected_optimism, read_answers
from slipway.search.proposals import TrialOutcome, frozen
from slipway.search.study import Study
from slipway.system.errors import MetricError

# The positions of the trials on an axis, from 0 to 1, and the labels of its two ends.
_Axis = tuple[list[float | None], tuple[str, str]]
PAGE = Path("reports/search.html")
_MOST_SHOWN = 20  # largest number of trials in a chart of intervals
_WIDTH, _HEIGHT, _TOP, _SIDE = 600, 300, 40, 55
_FEWEST_CHOICES = 2  # finished trials that make the winner a choice
_TOO_FEW = 4  # finished trials from which importances are shown
_OPTIMISM = (
    "The best of several trials looks better on the rows that chose it than it is. The expected "
    "score chooses on rows drawn with replacement and measures on the others (bootstrap bias "
    "correction, Tsamardinos et al. 2018). The test rows, which slipway take opens, decide."
)


def search_page(study: Study, space: Space, optimism: Optimism | None) -> str:
    """Return the HTML page of a search that has at least one result."""
    latest = latest_results(study)
    metric, best = study.schedule.params.metric, study.schedule.best()
    about = f"{len(latest)} trials by {study.schedule.params.method}, {study.threads} threads each"
    return page(
        f"Search {study.name}",
        about,
        [
            _summary(study, latest, best, optimism),
            section("History", beside(_history(latest, metric, study))),
            _winner(study, latest, optimism),
            _importance(study, space, latest),
            _parallel(study, space, latest),
            section("Trials", *_trials(study, latest)),
        ],
    )


_LINES = "Each line is a trial; the darker, the better. Stopped trials have their last score."


def latest_results(study: Study) -> dict[int, ResultLine]:
    """Return the last result of each trial, by the number of the trial."""
    results = study.schedule.results
    latest = {results[job].trial: results[job] for job in sorted(results)}
    return dict(sorted(latest.items()))


def optimism_of(study: Study, space: Space, top_k: int | None, seed: int) -> Optimism | None:
    """Estimate by how much the best trial's validation score is too good, being the best of many.

    `top_k` is the rank within which a label counts for top-k accuracy. Returns None if fewer than
    two trials have answers for the same rows, or the metric is not computed from rows.
    """
    params = study.schedule.params
    done = [one.trial for one in latest_results(study).values() if one.status == "done"]
    answers = read_answers({trial: study.answers(trial).with_suffix(".npz") for trial in done})
    task = value_at(dict(space.content), "data.task")
    if len(answers) < _FEWEST_CHOICES or params.metric not in kind_of(task).target.metrics:
        return None
    targets = next(iter(answers.values()))[0]
    if any(not np.array_equal(own, targets) for own, _ in answers.values()):
        return None
    try:
        return expected_optimism(
            task,
            params.metric,
            targets,
            [outputs for _, outputs in answers.values()],
            maximize=params.direction == "maximize",
            top_k=top_k,
            seed=seed,
        )
    except MetricError:
        return None


def _summary(
    study: Study,
    latest: Mapping[int, ResultLine],
    best: ResultLine | None,
    optimism: Optimism | None,
) -> Html:
    schedule = study.schedule
    counts = {
        status: sum(one.status == status for one in latest.values())
        for status in ("done", "stopped", "failed")
    }
    trained = sum(one.epoch for one in latest.values())
    seconds = sum(one.seconds for one in schedule.results.values())
    entries = []
    if best is not None:
        entries.append(
            (f"best {schedule.params.metric}", _value(best), study.trial_name(best.trial))
        )
    if optimism:
        entries.append(("expected on other rows", number(optimism.expected), "validation rows"))
    ended = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    entries.append(("trials", str(len(latest)), ended))
    whole = schedule.epochs * len(latest)
    entries.append(("epochs", str(trained), f"{whole} without early stopping"))
    entries.append(("training", f"{seconds / 60:.1f} min", "of all trials together"))
    return section("Summary", tiles(entries))


def _history(latest: Mapping[int, ResultLine], metric: str, study: Study) -> list[Html]:
    """Draw the score of each trial, and the best score of the finished trials so far."""
    scored = {trial: one for trial, one in latest.items() if one.score is not None}
    if not scored:
        return [paragraph("No trial has a score.", "soft")]
    pick = max if study.schedule.params.direction == "maximize" else min
    best: dict[float, float] = {}
    for trial, one in scored.items():
        if one.status == "done" and one.score is not None:
            best[float(trial)] = pick([one.score, *best.values()])
    lines = [Series("best so far", list(best), list(best.values()))]
    for name, status in (("done", "done"), ("stopped early", "stopped")):
        found = {
            float(trial): one.score
            for trial, one in scored.items()
            if one.status == status and one.score is not None
        }
        lines.append(Series(name, list(found), list(found.values()), are_dots=True))
    return [line_chart([line for line in lines if line.x], "trial", metric)]


def _winner(
    study: Study, latest: Mapping[int, ResultLine], optimism: Optimism | None
) -> Html | None:
    schedule = study.schedule
    sign = -1 if schedule.params.direction == "maximize" else 1
    done = [one for one in latest.values() if one.status == "done" and one.metric]
    if not done:
        return None
    done.sort(key=lambda one: sign * (one.score or 0.0))
    line = None if optimism is None else optimism.expected
    rows = {
        study.trial_name(one.trial): IntervalRow(one.metric, line=line)
        for one in done[:_MOST_SHOWN]
        if one.metric
    }
    parts = [
        interval_chart(
            rows, "" if line is None else "the expected score of the winner on other rows"
        )
    ]
    if optimism:
        text = (
            f"The best of {optimism.num_trials} finished trials scores {number(optimism.score)}. "
            f"On other rows {number(optimism.expected)} is expected, between "
            f"{number(optimism.low)} and {number(optimism.high)}: the optimism of the selection is "
            f"{number(optimism.amount)}."
        )
        parts.append(paragraph(text))
    return section("Finished trials", *parts, paragraph(_OPTIMISM, "note"))


def _importance(study: Study, space: Space, latest: Mapping[int, ResultLine]) -> Html | None:
    found = importances(study, space, latest)
    if not found:
        return None
    groups = [
        BarGroup(key, {"importance": value}, f"{value:.0%}")
        for key, value in sorted(found.items(), key=lambda entry: -entry[1])
    ]
    note = (
        "The part of the variance of the score that each key explains, by a random forest (fANOVA "
        "of Optuna). Of few trials it is only a hint."
    )
    chart = bar_groups(groups, ["importance"], "importance of each key")
    return section("Importance of the keys", chart, paragraph(note, "note"))


def importances(study: Study, space: Space, latest: Mapping[int, ResultLine]) -> dict[str, float]:
    """Return the importance of each key of the space, which add up to 1.

    Empty for too few trials, or if all scores are equal.
    """
    import optuna

    values = _values(study)
    outcomes = [
        TrialOutcome(values[one.trial], "done", one.score, one.epoch)
        for one in latest.values()
        if one.status == "done"
    ]
    if len(outcomes) < _TOO_FEW or len({outcome.score for outcome in outcomes}) < 2:
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    made = optuna.create_study(direction=study.schedule.params.direction)
    made.add_trials([frozen(space, outcome) for outcome in outcomes])
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return dict(optuna.importance.get_param_importances(made, evaluator=evaluator))
        except (RuntimeError, ValueError):  # no key that all trials have, or all values are equal
            return {}


def _parallel(study: Study, space: Space, latest: Mapping[int, ResultLine]) -> Html | None:
    """Draw parallel coordinates: an axis for each key and the score, a line for each trial."""
    scored = [one for one in latest.values() if one.score is not None]
    if not scored:
        return None
    values = _values(study)
    keys = [dimension.key for dimension in space.dimensions]
    axes: dict[str, list[Any]] = {
        key: [values[one.trial].get(key) for one in scored] for key in keys
    }
    axes[study.schedule.params.metric] = [one.score for one in scored]
    logs = [one.key for one in space.dimensions if one.params.log_range]
    places = {name: _places(column, is_log=name in logs) for name, column in axes.items()}
    step = (_WIDTH - 2 * _SIDE) / max(len(axes) - 1, 1)
    ranks = [rank or 0.0 for rank in places[study.schedule.params.metric][0]]
    if study.schedule.params.direction != "maximize":
        ranks = [1 - rank for rank in ranks]
    drawn = [*_trial_lines(places.values(), ranks, step), *_axes(places, step)]
    label = f"values of {len(scored)} trials"
    drawing = Html(
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(drawn)}</svg>"
    )
    return section("Values", drawing, paragraph(_LINES, "note"))


def _trial_lines(axes: Collection[_Axis], ranks: Sequence[float], step: float) -> Iterator[str]:
    """Draw a line for each trial; the better its rank, from 0 to 1, the darker the line."""
    for row, rank in enumerate(ranks):
        places = [found[row] for found, _ in axes]
        points = " ".join(
            f"{_SIDE + column * step:.1f},{_y(place):.1f}"
            for column, place in enumerate(places)
            if place is not None
        )
        yield (
            f'<polyline class="line first" points="{points}" '
            f'style="opacity:{0.15 + 0.85 * rank:.2f}"/>'
        )


def _axes(axes: Mapping[str, _Axis], step: float) -> Iterator[str]:
    """Draw a vertical axis for each key, with its name and the labels of its ends."""
    names = zip(_short(list(axes)), axes.values(), strict=True)
    for column, (short, (_, ends)) in enumerate(names):
        x = _SIDE + column * step
        yield (
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _TOP}"/>'
            f'<text x="{x:.1f}" y="{_HEIGHT - _TOP + 16}" text-anchor="middle">'
            f"{escape(ends[0])}</text>"
            f'<text x="{x:.1f}" y="{_TOP - 22}" text-anchor="middle">'
            f"{escape(short)}</text>"
            f'<text x="{x:.1f}" y="{_TOP - 6}" text-anchor="middle">{escape(ends[1])}</text>'
        )


def _places(column: Sequence[Any], *, is_log: bool) -> _Axis:
    """Return positions of the values on an axis, from 0 to 1, and the labels of its two ends.

    A trial without the key has the position None.
    """
    known = [one for one in column if one is not None]
    if known and all(isinstance(one, int | float) and not isinstance(one, bool) for one in known):
        low, high = min(known), max(known)
        scale = np.log if is_log else np.float64
        reach = float(scale(high) - scale(low)) or 1.0
        found = [None if one is None else float(scale(one) - scale(low)) / reach for one in column]
        return found, (f"{low:.4g}", f"{high:.4g}")
    names = sorted({_plain(one) for one in known})
    most = max(len(names) - 1, 1)
    found = [None if one is None else names.index(_plain(one)) / most for one in column]
    return found, (names[0], names[-1]) if names else ("", "")


def _plain(value: Any) -> str:
    """Format a value as in params.yaml, but text without quotes."""
    return value if isinstance(value, str) else as_yaml(value)


def _y(place: float) -> float:
    return _HEIGHT - _TOP - place * (_HEIGHT - 2 * _TOP)


def _trials(study: Study, latest: Mapping[int, ResultLine]) -> list[Html]:
    """List every trial, and the causes of failures."""
    keys = list(study.schedule.params.space)
    values = _values(study)
    metric = study.schedule.params.metric
    columns = ["trial", "status", metric, "interval", "epochs", "seconds", *_short(keys)]
    rows = [
        [
            f"{trial:03d}",
            one.status,
            _value(one),
            interval(one.metric) if one.metric else "",
            str(one.epoch),
            f"{study.seconds(trial):.0f}",
            *(_plain(values[trial][key]) if key in values[trial] else "" for key in keys),
        ]
        for trial, one in latest.items()
    ]
    parts = [table(columns, rows, [metric, "epochs", "seconds", *_short(keys)])]
    failures = [[study.trial_name(trial), one.cause] for trial, one in latest.items() if one.cause]
    if failures:
        parts.append(table(["failed trial", "cause"], failures))
    return parts


def _short(keys: Sequence[str]) -> list[str]:
    """Shorten keys to their last part; keep the whole key if two keys have the same last part."""
    last = [key.rpartition(".")[2] for key in keys]
    return [key if last.count(name) > 1 else name for key, name in zip(keys, last, strict=True)]


def _value(line: ResultLine) -> str:
    return "" if line.score is None else number(line.score)


def _values(study: Study) -> dict[int, Values]:
    return {job.trial: job.values for job in study.schedule.jobs}
