"""Measures each variant on each available provider: predictions, speed and memory.

The variants of a provider are timed in turns. The measurements use validation rows; only `verify`
uses the test rows, to judge the choice.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import Choice, MeasuredFigures, Metric, ModelFile, OutputContract
from slipway.artifacts.leaderboard import Attempt, Leaderboard, LeaderboardLine
from slipway.artifacts.uncertainty import Answers, Calibration, flipped_rows
from slipway.config.sections import GoalParams
from slipway.data.store.packed import PackedSplit
from slipway.export.certification.lineage import describe_hardware
from slipway.export.certification.timings import measure_in_turns, repeated_rows
from slipway.export.graphs.variants import refuse_broken
from slipway.export.precision.choice import choose
from slipway.export.precision.session_memory import session_peak_bytes
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.paired_bootstrap import paired_difference
from slipway.metrics.scores import Resampling, measure
from slipway.metrics.uncertainty import ood_fraction, score_rank
from slipway.runtimes.runtime import Runner, open_onnx, run_in_batches, why_unavailable

PROVIDERS = ("cpu", "cuda")
_BATCH_SIZE = 64
# Rows that are also answered one by one, to see if an answer depends on the rest of its batch.
_SINGLE_ROWS, _SINGLE_ROWS_S = 64, 2.0


@dataclass(frozen=True)
class Contest:
    """The rows and rules by which the variants of a bundle are compared."""

    task: Task
    output: OutputContract
    validation: PackedSplit
    resampling: Resampling
    largest_batch: int
    # Thresholds by variant. Without one, rows of the variant are not flagged as OOD.
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)

    def thresholds_of(self, variant: str) -> Sequence[float] | None:
        """Return the variant's thresholds of the labels; None if it has none."""
        calibration = self.calibrations.get(variant)
        return calibration.thresholds if calibration else None


@dataclass(frozen=True)
class Effort:
    """Limits on the time to measure speed, and on memory measurements."""

    limit_s: float  # approximate, for the timings of one provider
    memory: bool  # True starts a process for each variant


FULL = Effort(limit_s=20.0, memory=True)


@dataclass(frozen=True)
class MeasuredVariant:
    """One variant on one provider, before one of them is chosen."""

    figures: MeasuredFigures
    flipped: list[str]  # ids of the rows whose label is not fp32's
    rows_per_second: dict[int, float]  # medians by batch size


def make_leaderboard(
    root: Path,
    models: Mapping[str, ModelFile],
    contest: Contest,
    goal: GoalParams,
    effort: Effort,
    left_out: dict[str, str],
    attempts: dict[str, list[Attempt]],
) -> Leaderboard:
    """Measure the graphs in `root`, and choose one of them for each provider.

    Raises:
        ParityError: a graph is broken.
    """
    lines: list[LeaderboardLine] = []
    choices: dict[str, Choice] = {}
    absent = {provider: reason for provider in PROVIDERS if (reason := why_unavailable(provider))}
    hardware = describe_hardware()
    for provider in PROVIDERS:
        if provider in absent:
            continue
        meant_for = {variant: provider in model.meant_for for variant, model in models.items()}
        # The same as in `verify`: every variant on the CPU, and on CUDA those meant for it.
        graphs = {
            variant: root / model.file
            for variant, model in models.items()
            if provider == "cpu" or meant_for[variant]
        }
        runners: dict[str, Runner] = {
            variant: open_onnx(
                graph.read_bytes(),
                variant=variant,
                precision=models[variant].precision,
                provider=provider,
                num_threads=0,
            )
            for variant, graph in graphs.items()
        }
        found = measure_provider(provider, runners, graphs, contest, effort)
        figures = {variant: one.figures for variant, one in found.items()}
        choice = choose(figures, meant_for, goal, contest.task, provider, hardware)
        choices[provider] = choice
        lines += [
            LeaderboardLine(
                variant=variant,
                provider=provider,
                is_meant_for=meant_for[variant],
                flipped=one.flipped,
                rows_per_second=one.rows_per_second,
                figures=choice.figures[variant],
            )
            for variant, one in found.items()
        ]
    return Leaderboard(
        task=contest.task,
        metric=kind_of(contest.task).target.headline,
        rows=len(contest.validation),
        lines=lines,
        choice=choices,
        absent=absent,
        left_out=left_out,
        attempts=attempts,
    )


def measure_provider(
    provider: str,
    runners: Mapping[str, Runner],
    graphs: Mapping[str, Path],
    contest: Contest,
    effort: Effort,
) -> dict[str, MeasuredVariant]:
    """Measure predictions, speed, size and memory of each variant on one provider.

    Memory is measured on the CPU only, because the figure is the memory of a process.
    """
    inputs = contest.validation.inputs
    answers = {
        variant: run_in_batches(runner.run, inputs, _BATCH_SIZE)
        for variant, runner in runners.items()
    }
    reference = answers["fp32"]
    for variant, found in answers.items():
        refuse_broken(variant, found, reference, contest.output)
    timings = measure_in_turns(
        runners, inputs, contest.largest_batch, effort.limit_s, contest.resampling.confidence
    )
    has_memory = effort.memory and provider == "cpu"
    measured: dict[str, MeasuredVariant] = {}
    for variant, found in answers.items():
        speeds = timings.rows_per_second(variant)
        largest = repeated_rows(inputs, max(speeds))
        thresholds = contest.thresholds_of(variant), contest.thresholds_of("fp32")
        flipped = flipped_rows(found.outputs, reference.outputs, thresholds)
        batch_size, confidence = timings.best_batch_size(variant), contest.resampling.confidence
        figures = MeasuredFigures(
            **_quality(variant, found, reference, contest),
            num_flipped=len(flipped),
            batch_dependence=_batch_dependence(runners[variant], found.outputs, contest),
            p50_ms=timings.p50_ms(variant),
            p99_ms=timings.p99_ms(variant),
            rows_per_second=speeds[batch_size],
            batch_size=batch_size,
            latency=timings.latency(variant, "fp32", confidence),
            throughput=timings.throughput(variant, "fp32", confidence),
            bytes=graphs[variant].stat().st_size,
            memory_bytes=session_peak_bytes(graphs[variant], largest) if has_memory else None,
        )
        ids = [contest.validation.ids[row] for row in flipped]
        measured[variant] = MeasuredVariant(figures, ids, speeds)
    return measured


def metric_loss(
    task: Task,
    targets: NDArray[Any],
    before: NDArray[np.float32],
    after: NDArray[np.float32],
    resampling: Resampling,
    thresholds: tuple[Sequence[float] | None, Sequence[float] | None] = (None, None),
) -> Metric:
    """Measure how much worse `after` is than `before` on the same rows, with a paired interval.

    The unit is accuracy points, or relative growth of the RMSE.
    """
    target = kind_of(task).target
    found = paired_difference(
        task, target.headline, targets, before, after, resampling, thresholds=thresholds
    )
    bounds = found.difference, found.low, found.high
    if target.headline_is_fraction:  # a loss is a decrease
        value, high, low = (-bound for bound in bounds)
    else:
        value, low, high = (bound / max(found.before, 1e-12) for bound in bounds)
    return Metric(
        value=value + 0.0,  # + 0.0 turns -0.0 into 0.0
        low=low + 0.0,
        high=high + 0.0,
        confidence=found.confidence,
        rows=found.rows,
    )


def _quality(variant: str, answers: Answers, expected: Answers, contest: Contest) -> dict[str, Any]:
    """Return the fields of MeasuredFigures that compare answers with the targets and with fp32."""
    task, targets, resampling = contest.task, contest.validation.targets, contest.resampling
    found, reference = answers.outputs, expected.outputs
    calibration, confidence = contest.calibrations.get(variant), resampling.confidence
    name = kind_of(task).target.headline
    own, of_fp32 = contest.thresholds_of(variant), contest.thresholds_of("fp32")
    metrics = measure(task, targets, found, resampling, names=[name], thresholds=own)
    return {
        "metric": metrics[name],
        "metric_loss": metric_loss(task, targets, reference, found, resampling, (of_fp32, own)),
        "max_difference": float(np.abs(found - reference).max()),
        "ood_fraction": ood_fraction(answers.scores, calibration, confidence)
        if calibration
        else None,
        "score_rank": score_rank(answers.scores, expected.scores),
    }


def _batch_dependence(runner: Runner, found: NDArray[np.float32], contest: Contest) -> float:
    """Return the largest change of an output if its row is run alone; relative for values."""
    largest, deadline = 0.0, time.monotonic() + _SINGLE_ROWS_S
    for row in range(min(_SINGLE_ROWS, len(found))):
        single = runner.run(np.ascontiguousarray(contest.validation.inputs[row : row + 1])).outputs
        largest = max(largest, float(np.abs(single - found[row]).max()))
        if time.monotonic() > deadline:
            break
    if kind_of(contest.task).target.has_classes:
        return largest
    return largest / max(1.0, float(np.abs(found).max()))  # the same as in `verify`
