"""`slipway search --folds`: cross-validation, which trains one model for each held-out fold.

Each fold runs as a trial of a search, with a folder, a journal and an experiment. Every row outside
the test split is predicted once, by the model that was not trained on it, and the metrics are
computed over all these predictions. The test rows stay unused.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipway.artifacts.bundle import Metric
from slipway.config.params import parse_params, value_at
from slipway.config.search import BudgetParams, DimensionParams, SearchParams
from slipway.kinds.registry import kind_of
from slipway.metrics.scores import Resampling, measure
from slipway.planning.search_space import SearchDimension, Space, metrics_of
from slipway.reports.console import interval, number
from slipway.search.journal import ResultLine
from slipway.search.optimism import read_answers
from slipway.search.page import latest_results
from slipway.search.run import read_project, run_trials
from slipway.search.study import Study
from slipway.system.errors import ParamsError, SlipwayError

FOLD = "split.fold"


@dataclass(frozen=True)
class CrossValidation:
    """The result of a cross-validation: metrics over all folds, and the score of each fold."""

    study: Study
    headline: str
    metrics: Mapping[str, Metric]  # over the held-out predictions of all folds
    folds: Mapping[int, ResultLine]  # by the number of the fold, from 0
    shown: Sequence[str]  # metrics to print in addition to the headline

    @property
    def scores(self) -> list[float]:
        """Score of each fold on its held-out rows, without failed folds."""
        return [line.score for line in self.folds.values() if line.score is not None]


def cross_validate(
    name: str | None, *, is_quiet: bool = False, is_joint: bool = False
) -> CrossValidation:
    """Train a model for each fold, or resume an interrupted cross-validation with equal settings.

    Raises ParamsError if `split.folds` is null, SlipwayError if the training of a fold failed.
    """
    text, content = read_project()
    whole = parse_params(content)
    if whole.split.folds is None:
        raise ParamsError(
            "split.folds is null, expected the number of folds to train on. "
            "Run `slipway set split.folds=5`, then this again."
        )
    params = _params(whole.data.task, whole.split.folds, whole.seed, whole.search)
    space = Space(
        [SearchDimension(FOLD, params.space[FOLD], is_integer=False)],
        content | {"search": params.model_dump(mode="json")},
    )
    study = run_trials(
        text, space, params, name, prefix="folds", is_quiet=is_quiet, is_joint=is_joint
    )
    lines = latest_results(study)
    failed = [line for line in lines.values() if line.status == "failed"]
    if failed:
        raise SlipwayError(
            f"{study.trial_name(failed[0].trial)} failed, expected a model of each fold: "
            f"{failed[0].cause}\nCorrect this, and run the command again."
        )
    settings = whole.evaluate
    resampling = Resampling(whole.seed, settings.bootstrap_samples, settings.confidence)
    return CrossValidation(
        study,
        params.metric,
        _measured(study, value_at(content, "data.task"), resampling, settings.top_k),
        dict(sorted((_fold(study, trial), line) for trial, line in lines.items())),
        kind_of(whole.data.task).target.compared_metrics,
    )


def _params(task: str, folds: int, seed: int, given: SearchParams | None) -> SearchParams:
    """Return the settings of the search that runs one trial for each fold."""
    headline = kind_of(task).target.headline
    return SearchParams(
        method="grid",
        metric=headline,
        direction="minimize" if metrics_of(task)[headline] == "minimize" else "maximize",
        budget=BudgetParams(trials=folds, epochs=None, minutes=None),
        halving=None,
        workers=given.workers if given else 1,
        seed=seed,
        space={FOLD: DimensionParams(choice=list(range(folds)))},
    )


def _measured(
    study: Study, task: Any, resampling: Resampling, top_k: int | None
) -> dict[str, Metric]:
    trials = range(study.schedule.num_trials)
    found = read_answers({trial: study.answers(trial).with_suffix(".npz") for trial in trials})
    if len(found) < len(trials):
        raise SlipwayError(
            f"the answers of {len(trials) - len(found)} folds are missing below {study.folder}, "
            f"expected those of {len(trials)}. Remove {study.folder}, and run the command again."
        )
    targets, outputs = (np.concatenate(parts) for parts in zip(*found.values(), strict=True))
    return measure(task, targets, outputs, resampling, top_k=top_k)


def _fold(study: Study, trial: int) -> int:
    return int(next(job.values[FOLD] for job in study.schedule.jobs if job.trial == trial))


def conclude(found: CrossValidation) -> None:
    """Print the score of all folds together and the score of each fold."""
    pooled, scores = found.metrics[found.headline], found.scores
    each = ", ".join(map(number, scores))
    others = ", ".join(
        f"{name} {number(metric.value)} {interval(metric)}"
        for name, metric in found.metrics.items()
        if name in found.shown and name != found.headline
    )
    print(
        f"\n{found.study.name}: {found.headline} {number(pooled.value)} {interval(pooled)} on the "
        f"{pooled.rows:,} rows of all {len(scores)} folds\n"
        f"folds: {each}; standard deviation {number(statistics.stdev(scores))}\n{others}\n"
        "The test rows stay closed. `slipway compare` lists the models."
    )


def as_json(found: CrossValidation) -> Mapping[str, Any]:
    """Return the result in the form that `--json` prints."""
    return {
        "search": found.study.name,
        "metric": found.headline,
        "metrics": {name: metric.model_dump(mode="json") for name, metric in found.metrics.items()},
        "folds": [
            {
                "fold": fold,
                "name": found.study.trial_name(line.trial),
                "score": line.score,
                "interval": line.metric.model_dump(mode="json") if line.metric else None,
                "seconds": round(found.study.seconds(line.trial), 1),
            }
            for fold, line in found.folds.items()
        ],
    }
