"""Every variant on every provider that is there: what it answers to the validation rows, how fast, in how much memory.

The variants of a provider are timed in turns. The test rows are not touched here: they are for `verify` to judge what was chosen.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Choice, Metric, ModelFile, OutputContract, VariantFigures
from slipway.artifacts.uncertainty import Answers, Calibration
from slipway.config.sections import GoalParams
from slipway.data.store.packed import PackedSplit
from slipway.export.certification.comparison import headline
from slipway.export.certification.lineage import describe_hardware
from slipway.export.certification.timing import Timings, measure_in_turns
from slipway.export.graphs.variants import refuse_broken, run_in_batches
from slipway.export.precision.choice import choose
from slipway.export.precision.session_memory import session_peak_bytes
from slipway.kinds.registry import Task, is_classification
from slipway.metrics.paired_bootstrap import paired_difference
from slipway.metrics.scores import Resampling, measure
from slipway.metrics.uncertainty import ood_fraction, score_rank
from slipway.reports.pages.leaderboard_page import Attempt, Leaderboard, LeaderboardLine
from slipway.runtimes.runtime import Runner, open_onnx, why_unavailable

PROVIDERS = ("cpu", "cuda")
_BATCH_SIZE = 64
_ROWS_ALONE, _ALONE_S = (
    64,
    2.0,
)  # answered one by one as well, to see whether an answer depends on the rows beside it


@dataclass(frozen=True)
class Contest:
    """What the variants are compared on."""

    task: Task
    output: OutputContract
    validation: PackedSplit
    resampling: Resampling
    largest_batch: int
    calibrations: Mapping[str, Calibration] = field(
        default_factory=dict
    )  # by variant; without one its outliers are not counted


@dataclass(frozen=True)
class Effort:
    """How much is spent on speed and memory."""

    limit_s: float  # for the timings of one provider, about
    memory: bool  # whether a process is started for each variant


FULL = Effort(limit_s=20.0, memory=True)


def make_leaderboard(
    root: Path,
    models: Mapping[str, ModelFile],
    contest: Contest,
    goal: GoalParams,
    effort: Effort,
    left_out: dict[str, str],
    attempts: dict[str, list[Attempt]],
) -> Leaderboard:
    """Measure the graphs in `root` and choose for each provider. ParityError if one of them is broken."""
    lines: list[LeaderboardLine] = []
    choices: dict[str, Choice] = {}
    absent = {provider: reason for provider in PROVIDERS if (reason := why_unavailable(provider))}
    hardware = describe_hardware()
    for provider in PROVIDERS:
        if provider in absent:
            continue
        # As in `verify`: on the CPU every variant, on CUDA those that are meant for it.
        measured = {
            variant: model
            for variant, model in models.items()
            if provider == "cpu" or provider in model.meant_for
        }
        runners = {
            variant: _open(root, variant, model, provider) for variant, model in measured.items()
        }
        meant_for = {variant: provider in model.meant_for for variant, model in measured.items()}
        found = measure_provider(provider, runners, contest, effort)
        found = {
            variant: _with_file(line, root, measured[variant], contest, effort)
            for variant, line in found.items()
        }
        figures = {variant: line.figures for variant, line in found.items()}
        choices[provider] = choose(figures, meant_for, goal, contest.task, provider, hardware)
        judged = choices[provider].figures
        lines += [
            line.model_copy(update={"figures": judged[v], "is_meant_for": meant_for[v]})
            for v, line in found.items()
        ]
    return Leaderboard(
        task=contest.task,
        metric=headline(contest.task),
        rows=len(contest.validation),
        lines=lines,
        choice=choices,
        absent=absent,
        left_out=left_out,
        attempts=attempts,
    )


def measure_provider(
    provider: str, runners: Mapping[str, Runner], contest: Contest, effort: Effort
) -> dict[str, LeaderboardLine]:
    """What each variant answers and how fast it is; file and memory are still to be filled in."""
    inputs = contest.validation.inputs
    answers = {
        variant: run_in_batches(runner, inputs, _BATCH_SIZE) for variant, runner in runners.items()
    }
    for variant, found in answers.items():
        refuse_broken(variant, found, answers["fp32"], contest.output)
    reference = answers["fp32"]
    timings = measure_in_turns(
        runners, inputs, contest.largest_batch, effort.limit_s, contest.resampling.confidence
    )
    return {
        variant: LeaderboardLine(
            variant=variant,
            provider=provider,
            is_meant_for=True,
            flipped=[
                contest.validation.ids[row] for row in _flipped(found.outputs, reference.outputs)
            ],
            rows_per_second=timings.rows_per_second(variant),
            figures=_figures(variant, found, reference, runners[variant], timings, contest),
        )
        for variant, found in answers.items()
    }


def metric_loss(
    task: Task,
    targets: NDArray[np.float64],
    before: NDArray[np.float32],
    after: NDArray[np.float32],
    resampling: Resampling,
) -> Metric:
    """What `after` loses against `before` on the same rows, with its paired interval: accuracy points, or relative growth of the RMSE."""
    found = paired_difference(task, headline(task), targets, before, after, resampling)
    if is_classification(task):  # a loss is downwards
        value, low, high = -found.difference, -found.high, -found.low
    else:
        value, low, high = (
            bound / max(found.before, 1e-12) for bound in (found.difference, found.low, found.high)
        )
    return Metric(
        value=value + 0.0,
        low=low + 0.0,
        high=high + 0.0,
        confidence=found.confidence,
        rows=found.rows,
    )  # + 0.0: no -0.0


def _figures(
    variant: str,
    answers: Answers,
    expected: Answers,
    runner: Runner,
    timings: Timings,
    contest: Contest,
) -> VariantFigures:
    task, targets, resampling = contest.task, contest.validation.targets, contest.resampling
    found, reference, calibration = (
        answers.outputs,
        expected.outputs,
        contest.calibrations.get(variant),
    )
    name, best = headline(task), timings.best_batch_size(variant)
    return VariantFigures(
        metric=measure(task, targets, found, resampling, names=[name])[name],
        metric_loss=metric_loss(task, targets, reference, found, resampling),
        max_difference=float(np.abs(found - reference).max()),
        num_flipped=len(_flipped(found, reference)),
        outliers=ood_fraction(answers.scores, calibration, resampling.confidence)
        if calibration
        else None,
        score_rank=score_rank(answers.scores, expected.scores),
        batch_dependence=_batch_dependence(runner, found, contest),
        p50_ms=timings.p50_ms(variant),
        p99_ms=timings.p99_ms(variant),
        rows_per_second=timings.rows_per_second(variant)[best],
        batch_size=best,
        latency=timings.latency(variant, "fp32", resampling.confidence),
        throughput=timings.throughput(variant, "fp32", resampling.confidence),
        bytes=0,
        memory_bytes=None,
        verdict="",
    )


def _flipped(found: NDArray[np.float32], reference: NDArray[np.float32]) -> NDArray[np.intp]:
    """The rows whose label changed; one column never flips."""
    return np.flatnonzero(found.argmax(axis=1) != reference.argmax(axis=1))


def _batch_dependence(runner: Runner, found: NDArray[np.float32], contest: Contest) -> float:
    largest, deadline = 0.0, time.monotonic() + _ALONE_S
    for row in range(min(_ROWS_ALONE, len(found))):
        alone = runner.run(np.ascontiguousarray(contest.validation.inputs[row : row + 1])).outputs
        largest = max(largest, float(np.abs(alone - found[row]).max()))
        if time.monotonic() > deadline:
            break
    return (
        largest
        if is_classification(contest.task)
        else largest / max(1.0, float(np.abs(found).max()))
    )  # as in `verify`


def _with_file(
    line: LeaderboardLine, root: Path, model: ModelFile, contest: Contest, effort: Effort
) -> LeaderboardLine:
    """Size, and memory with the largest batch that was timed: the process's, so it is told for the CPU alone."""
    memory = None
    if effort.memory and line.provider == "cpu":
        inputs = contest.validation.inputs
        memory = session_peak_bytes(
            root / model.file, inputs[np.arange(max(line.rows_per_second)) % len(inputs)]
        )
    return line.model_copy(
        update={
            "figures": line.figures.model_copy(
                update={"bytes": model.bytes, "memory_bytes": memory}
            )
        }
    )


def _open(root: Path, variant: str, model: ModelFile, provider: str) -> Runner:
    graph = (root / model.file).read_bytes()
    return open_onnx(
        graph, variant=variant, precision=model.precision, provider=provider, num_threads=0
    )
