"""Compares the search with early stopping with the full grid, and with Optuna's MedianPruner.

`python -m bench.search` trains every point of a small grid on the digits and on the housing table,
for five seeds, each with its own split. A training depends only on its params, and a promoted trial
continues from its checkpoint. So a search over these points can be replayed from their validation
curves: the real proposals and schedule decide, and the epochs that they need are counted. Finished
trainings below tmp/bench/search are not repeated.

`python -m bench.search overhead` measures what a trial costs beyond its `dvc repro train`.
"""

import functools
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
import pyarrow as pa
import pyarrow.csv

from bench.conditions import conditions
from slipway.artifacts.bundle import Metric
from slipway.config.params import parse_params, read_content
from slipway.config.yaml_text import as_yaml
from slipway.planning.search_space import Values, changed_content, read_space
from slipway.reports.console import number
from slipway.search.journal import ResultLine
from slipway.search.schedule import Schedule
from slipway.search.study import next_job
from slipway.system import files
from slipway.training.telemetry.curves import read_curves
from tests import warm_starts
from tests.planted_labels import NO_CHANGES, TABM, digits, run_stage, write_project

ROOT = Path.cwd()
HOUSING = ROOT.parent / "shared" / "data" / "housing" / "housing.csv"
SCRATCH = ROOT / "tmp" / "bench" / "search"
RESULT = ROOT / "bench/results/search.md"
OVERHEAD = ROOT / "bench/results/search_overhead.md"
SEEDS = range(5)
_TURNS = 4  # the first one does not count
EPOCHS, HALVING = 10, {"reduction": 3, "first_rung": 2}
_STANDARD_ERRORS = 2 * statistics.NormalDist().inv_cdf(0.975)  # in an interval of 95 %
COLUMNS = ("Data", "Search", *(f"Seed {seed}" for seed in SEEDS), "Epochs, median", "As good")


@dataclass(frozen=True)
class DataSet:
    """The source of the rows, the params of a project, and the grid."""

    name: str
    table: Callable[[], pa.Table]
    params: dict[str, dict[str, Any]]
    metric: str
    direction: Literal["minimize", "maximize"]
    grid: dict[str, list[Any]]


@dataclass(frozen=True)
class Curve:
    """A whole training: its validation loss and metric after each epoch, and its score."""

    losses: list[float]
    scores: list[float]
    metric: Metric  # of the kept model on the validation rows

    def kept(self, epoch: int) -> float:
        """Return the score of the epoch with the lowest loss so far, which a training keeps."""
        losses = self.losses[:epoch]
        return self.scores[losses.index(min(losses))]


@dataclass(frozen=True)
class Replayed:
    """The result of a replayed search: the winner, and the epochs of all its trials."""

    winner: Curve
    epochs: int


_EACH: dict[str, Any] = {"epochs": EPOCHS, "warmup_epochs": 1.0}
SETS = (
    DataSet(
        "digits",
        digits,
        {
            "data": {"task": "image_classification"},
            "precompute": {"image_size_px": 8},
            "train": _EACH,
        },
        "accuracy",
        "maximize",
        {
            "train.learning_rate": [0.0005, 0.002, 0.008, 0.03],
            "train.network_arguments.width": [16, 32],
        },
    ),
    DataSet(
        "housing",
        lambda: pyarrow.csv.read_csv(HOUSING),
        {
            "data": {"task": "table_regression", "target_column": "median_house_value"},
            "augment": NO_CHANGES,
            "train": TABM | _EACH | {"batch_size": 256},
            "evaluate": {"gates": {}, "slices": []},
        },
        "rmse",
        "minimize",
        {
            "train.learning_rate": [0.0005, 0.002, 0.008, 0.03],
            "train.network_arguments.width": [32, 64],
        },
    ),
)


def points(data: DataSet) -> list[Values]:
    """Return every point of the grid."""
    return [
        dict(zip(data.grid, values, strict=True))
        for values in itertools.product(*data.grid.values())
    ]


def trained(data: DataSet, seed: int) -> dict[str, Curve]:
    """Return the curve of each point of the grid, by its text; train missing ones."""
    folder = SCRATCH / data.name / str(seed)
    if not (folder / "data/augmented").is_dir():
        write_project(folder, data.table(), data.params)
        content = read_content(folder / "params.yaml") | {"seed": seed}
        (folder / "params.yaml").write_text(json.dumps(content))
        for stage in ("clean", "split", "precompute", "augment"):
            run_stage(folder, stage)
    content, found = read_content(folder / "params.yaml"), {}
    for number_of, values in enumerate(points(data)):
        place = SCRATCH / data.name / f"{seed}-{number_of:02d}.json"
        if not place.is_file():
            _train(data, folder, changed_content(content, values), place)
        saved = json.loads(place.read_bytes())
        metric = Metric.model_validate(saved["metric"])
        found[as_yaml(values)] = Curve(saved["losses"], saved["scores"], metric)
    return found


def _train(data: DataSet, folder: Path, content: Mapping[str, Any], place: Path) -> None:
    """Train one point in a folder that shares the packed rows, and write its curve."""
    own = folder.with_name(f"{folder.name}-trial")
    shutil.rmtree(own, ignore_errors=True)
    (own / "artifacts").mkdir(parents=True)
    (own / "data").symlink_to(folder / "data")
    (own / "params.yaml").write_text(json.dumps(content))
    started = time.monotonic()
    run_stage(own, "train")
    seconds = time.monotonic() - started
    done = warm_starts.run(
        ["slipway.search.validation", data.metric, "answers"],
        own,
        {**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"{place.stem} of {data.name} failed:\n{done.stdout}\n{done.stderr}")
    curves = read_curves(own / "reports/live")
    losses, scores = (
        next(one.y for one in curves[name] if one.name == "val") for name in ("loss", data.metric)
    )
    metric = json.loads((own / "answers.json").read_bytes())
    content = {"losses": losses, "scores": scores, "metric": metric, "seconds": seconds}
    files.write_json(place, content)
    print(f"{place.stem} of {data.name}: {metric['value']:.5g} in {seconds:.0f} s", flush=True)


def replay(data: DataSet, curves: Mapping[str, Curve], seed: int, **changes: Any) -> Replayed:
    """Replay `slipway search` over the grid's points."""
    section = {
        "method": "tpe",
        "metric": data.metric,
        "direction": data.direction,
        "budget": {"trials": len(curves), "epochs": None, "minutes": None},
        "halving": HALVING,
        "workers": 1,
        "seed": seed,
        "space": {key: {"choice": values} for key, values in data.grid.items()},
    }
    content = read_content(SCRATCH / data.name / str(seed) / "params.yaml")
    content |= {"search": section | changes}
    params = parse_params(content).search
    assert params is not None
    space, schedule = read_space(content, params), Schedule(params, EPOCHS)
    while job := next_job(schedule, space):
        schedule.jobs.append(job)
        schedule.results[job.job] = ResultLine(
            event="result",
            job=job.job,
            trial=job.trial,
            status="done" if job.epoch == EPOCHS else "stopped",
            epoch=job.epoch,
            score=curves[as_yaml(job.values)].kept(job.epoch),
            metric=None,
            seconds=0.0,
            cause="",
        )
    best = schedule.best()
    assert best is not None
    (winner,) = (job for job in schedule.jobs if job.job == best.job)
    reached = {job.trial: job.epoch for job in schedule.jobs}
    return Replayed(curves[as_yaml(winner.values)], sum(reached.values()))


def median_pruner(data: DataSet, curves: Mapping[str, Curve], seed: int) -> Replayed:
    """Replay the loop of Optuna's documentation: TPE and MedianPruner with default settings."""
    spent = 0

    def objective(trial: optuna.Trial) -> float:
        nonlocal spent
        values = {key: trial.suggest_categorical(key, own) for key, own in data.grid.items()}
        curve = curves[as_yaml(values)]
        trial.set_user_attr("values", as_yaml(values))
        for epoch, score in enumerate(curve.scores, start=1):
            spent += 1
            trial.report(score, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return curve.kept(EPOCHS)

    study = optuna.create_study(
        direction=data.direction,
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(),
    )
    study.optimize(objective, n_trials=len(curves))
    return Replayed(curves[study.best_trial.user_attrs["values"]], spent)


def full_grid(data: DataSet, curves: Mapping[str, Curve], seed: int) -> Replayed:
    """Replay the full grid: every point, trained to its end."""
    return replay(data, curves, seed, method="grid", halving=None)


SEARCHES: Mapping[str, Callable[[DataSet, Mapping[str, Curve], int], Replayed]] = {
    "full grid": full_grid,
    "grid, early stopping": functools.partial(replay, method="grid"),
    "TPE, early stopping": replay,
    "Optuna: TPE, MedianPruner": median_pruner,
}


def rows_of(data: DataSet) -> Iterator[list[str]]:
    """Return the lines of the table for one data set."""
    curves = {seed: trained(data, seed) for seed in SEEDS}
    grids = {seed: full_grid(data, curves[seed], seed) for seed in SEEDS}
    for name, search in SEARCHES.items():
        found = {seed: search(data, curves[seed], seed) for seed in SEEDS}
        shares = [found[seed].epochs / grids[seed].epochs for seed in SEEDS]
        good = sum(_is_as_good(data, found[seed].winner, grids[seed].winner) for seed in SEEDS)
        yield [
            data.name,
            name,
            *(
                f"{number(found[seed].winner.metric.value)} in {found[seed].epochs}"
                for seed in SEEDS
            ),
            f"{statistics.median(shares):.0%}",
            f"{good} of {len(SEEDS)}",
        ]


def _is_as_good(data: DataSet, winner: Curve, best: Curve) -> bool:
    """True if the score is at most one standard error of the grid's best below it."""
    error = (best.metric.high - best.metric.low) / _STANDARD_ERRORS
    sign = 1 if data.direction == "maximize" else -1
    return sign * (best.metric.value - winner.metric.value) <= error


def overhead(folder: Path) -> str:
    """Measure the cost of a trial beyond the `dvc repro train` of the same project, in turns.

    Each turn is a training by DVC, then an equal search whose budget is larger by one trial.
    The project is made in `folder`, which must be outside any repository of git.
    """
    data = str(ROOT / "data/demo/digits.parquet")
    _slipway(ROOT, "init", str(folder), "--data", data, "--target", "label", "--yes")
    _slipway(folder, "set", "train.epochs=3", "train.warmup_epochs=0.5")
    content = read_content(folder / "params.yaml")
    # None is the rate that `init` proposes: DVC would restore its training instead of running it.
    rates = [0.00203 + turn * 0.0002 for turn in range(_TURNS)]

    def write(trials: int, changes: Values) -> None:
        section = {
            "method": "grid",
            "metric": "accuracy",
            "direction": "maximize",
            "budget": {"trials": trials, "epochs": None, "minutes": None},
            "halving": None,
            "workers": 1,
            "seed": 7,
            "space": {"train.learning_rate": {"choice": rates}},
        }
        own = changed_content(content, changes) | {"search": section}
        (folder / "params.yaml").write_text(json.dumps(own))

    write(1, {})
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "-m", "A project to search in")
    train = [sys.executable, "-m", "dvc", "repro", "-q", "train"]
    again = [sys.executable, "-m", "slipway.cli", "search", "--json"]
    _timed(train, folder)  # with the stages before it
    _timed(again, folder)  # the first trial, not counted
    _, fixed, _ = _timed(again, folder)  # an equal search has nothing to train
    plain, trials, processor = [], [], []
    for turn in range(1, _TURNS):
        write(turn, {"train.learning_rate": rates[turn] + 0.0001})
        wall, own, _ = _timed(train, folder)
        write(turn + 1, {})
        _, whole, text = _timed(again, folder)
        plain.append(wall)
        trials.append(json.loads(text)["trials"][-1]["seconds"])
        processor.append(whole - fixed - own)
        print(f"turn {turn}: training {wall:.1f} s, trial {trials[-1]:.1f} s", flush=True)
    more = [trial - one for trial, one in zip(trials, plain, strict=True)]
    return (
        f"A trial of the digits takes {statistics.median(trials):.1f} s, its `dvc repro train` "
        f"{statistics.median(plain):.1f} s: {statistics.median(more):.1f} s more "
        f"({min(more):.1f} to {max(more):.1f}), {statistics.median(processor):.1f} s of processor "
        f"time. Medians of {_TURNS - 1} turns of one training and one trial, 3 epochs "
        "each. The time of a trial ends when its experiment is saved, its validation rows "
        "are answered and its folder is gone."
    )


def _timed(command: list[str], folder: Path) -> tuple[float, float, str]:
    """Run a command; return its wall-clock and processor seconds, and its output."""
    begun, started = _processor_seconds(), time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=_environment(folder), check=True, stdout=subprocess.PIPE, text=True
    )
    return time.monotonic() - started, _processor_seconds() - begun, done.stdout


def _slipway(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "slipway.cli", *arguments]
    return subprocess.run(
        command, cwd=folder, env=_environment(folder), check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, env=_environment(folder), check=True)


def _environment(folder: Path) -> dict[str, str]:
    roles = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL")
    own = {"PYTHONPATH": str(ROOT), "DVC_SITE_CACHE_DIR": str(folder / ".work/dvc")}
    return os.environ | dict.fromkeys(roles, "bench@localhost") | own


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Write the table of both data sets; with `overhead`, that of the cost of a trial."""
    if sys.argv[1:] == ["overhead"]:
        with tempfile.TemporaryDirectory() as folder:
            found = overhead(Path(folder) / "project")
        text = f"# What a trial costs beyond its training\n\n{found}"
        print(text)
        files.write_text(OVERHEAD, f"{text}\n\n{conditions('torch', 'dvc')}\n")
        return
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for seed in SEEDS:
        for data in SETS:
            trained(data, seed)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for data in SETS for row in rows_of(data)]
    text = "\n".join(lines)
    note = "\n\n".join(_NOTES)
    print(text)
    packages = ("torch", "optuna", "tabm")
    files.write_text(RESULT, f"{_TITLE}\n\n{text}\n\n{note}\n\n{conditions(*packages)}\n")


_TITLE = "# Searches over a grid, and the epochs that they need"
_NOTES = (
    f"Each cell: the validation score of the winner (accuracy of the digits, RMSE of housing), and "
    f"the epochs of all trials together. A whole trial has {EPOCHS} epochs; early stopping is "
    f"`halving: {{ reduction: {HALVING['reduction']}, first_rung: {HALVING['first_rung']} }}`.",
    "As good: at most one standard error of the grid's best score below it, on the same validation "
    "rows. Each seed draws another split, other initial weights and another search. The first ten "
    "proposals of TPE are random, Optuna's default.",
    "Trainings are real, searches replayed from their validation curves: a trial that goes on "
    "continues from its checkpoint, so its curve does not depend on the search. Optuna's loop "
    "trains a point again that it draws twice.",
)


if __name__ == "__main__":
    main()
