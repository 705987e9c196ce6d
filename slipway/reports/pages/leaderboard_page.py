"""`reports/leaderboard.json` and `.html`: every variant on every provider, what was chosen and why.

Accuracy and size are of the graph, speed and memory of the machine that exported it: on another one they are others.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from slipway.artifacts.bundle import Choice, Provider, Ratio, VariantFigures
from slipway.kinds.registry import Task, is_classification
from slipway.metrics.uncertainty import MIN_SCORE_RANK
from slipway.reports.console import interval, number, size, text_table
from slipway.reports.pages.html_page import Html, PageSection, join, page, paragraph, table, tiles
from slipway.system.contract import Contract

_PROVIDERS = {"cpu": "CPU", "cuda": "CUDA"}


class Attempt(Contract):
    """One way of quantising that was tried for a static int8 graph."""

    calibrator: Literal["minmax", "percentile", "entropy"]
    in_fp32: list[str]  # layers that were not quantised
    metric_loss: float | None  # on validation rows; null for answers that are no numbers


class LeaderboardLine(Contract):
    """One variant on one provider, beyond the figures that the bundle holds."""

    variant: str
    provider: str
    is_meant_for: bool  # else it is measured, never chosen
    flipped: list[str]  # ids of the validation rows whose label is not fp32's
    rows_per_second: dict[int, float]  # medians by batch size
    figures: VariantFigures


class Leaderboard(Contract):
    """The content of `reports/leaderboard.json`."""

    task: Task
    metric: str  # "accuracy" or "rmse"
    rows: int  # of the validation split
    lines: list[LeaderboardLine]
    choice: dict[Provider, Choice]
    absent: dict[str, str]  # providers that are not there, each with the reason
    left_out: dict[str, str]  # variants that were asked for and not made, each with the reason
    attempts: dict[str, list[Attempt]]  # by variant, where more than one was needed


def loss_of(attempt: Attempt) -> float:
    """Infinite for answers that are no numbers."""
    return math.inf if attempt.metric_loss is None else attempt.metric_loss


def leaderboard_text(board: Leaderboard) -> str:
    """What the stage prints: a table for each provider, the reasons, and what was asked for and did not come out."""
    parts = []
    for provider in board.choice:
        columns = [
            provider,
            board.metric,
            "loss",
            "flipped",
            "p50 ms",
            "p99 ms",
            "rows/s",
            "times fp32",
            "size",
            "memory",
        ]
        parts.append(
            text_table(
                columns,
                [_cells(line, board.task) for line in board.lines if line.provider == provider],
            )
        )
    for provider, choice in board.choice.items():
        parts.append(f"{provider}: {choice.variant} is chosen. {choice.reason}")
        if choice.variant != "fp32":  # else the reason has them
            parts += [
                f"  {line.variant}: {line.figures.verdict}"
                for line in board.lines
                if line.provider == provider and line.variant not in ("fp32", choice.variant)
            ]
    parts += [
        f"{line.provider}: {line.variant} hardly keeps the order of fp32's outlier scores (correlation {line.figures.score_rank:.2f}): "
        "its is_outlier finds fewer strangers"
        for line in board.lines
        if line.figures.score_rank is not None and line.figures.score_rank < MIN_SCORE_RANK
    ]
    parts += [f"{provider}: not measured, {reason}" for provider, reason in board.absent.items()]
    parts += [f"{variant}: left out, {reason}" for variant, reason in board.left_out.items()]
    parts += [f"{variant}: {_told(attempts)}" for variant, attempts in board.attempts.items()]
    return "\n".join(parts)


def leaderboard_page(board: Leaderboard) -> str:
    """The whole page."""
    sections = [
        section
        for provider, choice in board.choice.items()
        for section in _provider_sections(board, provider, choice)
    ]
    if board.left_out or board.absent:
        sections.append(PageSection("Asked for and not there", _not_there(board)))
    if board.attempts:
        sections.append(PageSection("What was tried for int8", _attempts(board.attempts)))
    sections.append(PageSection("How this was measured", _notes(board)))
    return page(
        "Leaderboard of variants",
        f"{board.metric} on {board.rows:,} validation rows; speed on this machine",
        sections,
    )


def _provider_sections(board: Leaderboard, provider: str, choice: Choice) -> list[PageSection]:
    name, lines = _PROVIDERS[provider], [line for line in board.lines if line.provider == provider]
    columns = [
        "variant",
        board.metric,
        "interval",
        "loss against fp32",
        "flipped rows",
        "size",
        "memory",
    ]
    answers = table(
        columns,
        [_answer_cells(line, board.task) for line in lines],
        numeric=[columns[1], *columns[4:]],
    )
    outlier_columns = ["variant", "called outliers", "interval", "order of scores"]
    outliers = table(
        outlier_columns, [_outlier_cells(line) for line in lines], numeric=outlier_columns[1:]
    )
    if all(line.figures.outliers is None for line in lines):
        outliers = join(
            [
                outliers,
                paragraph(
                    "No row is called an outlier: the validation rows were too few for a threshold.",
                    "note",
                ),
            ]
        )
    speed_columns = [
        "variant",
        "p50 ms",
        "p99 ms",
        "one row against fp32",
        "rows/s",
        "batch",
        "rows/s against fp32",
    ]
    speed = table(speed_columns, [_speed_cells(line) for line in lines], numeric=speed_columns[1:])
    verdicts = table(
        ["variant", "verdict"], [[line.variant, line.figures.verdict] for line in lines]
    )
    return [
        PageSection(
            f"Chosen on the {name}: {choice.variant}",
            join([tiles(_boxes(choice, board.task)), paragraph(choice.reason, "note"), verdicts]),
        ),
        PageSection(f"Answers on the {name}", join([answers, outliers])),
        PageSection(
            f"Speed on the {name}",
            join(
                [speed, paragraph("Rows in a second, by batch size", "note"), _by_batch_size(lines)]
            ),
        ),
    ]


def _boxes(choice: Choice, task: Task) -> list[tuple[str, str, str]]:
    figures = choice.figures[choice.variant]
    return [
        (
            "rows a second",
            _short(figures.rows_per_second),
            f"{times_text(figures.throughput)} fp32's",
        ),
        ("one row", f"{figures.p50_ms:.3g} ms", f"{times_text(figures.latency)} as fast"),
        (
            "loss",
            loss_text(figures.metric_loss.value, task),
            f"at most {loss_text(choice.max_metric_loss, task)}",
        ),
        ("file", size(figures.bytes), ""),
    ]


def _answer_cells(line: LeaderboardLine, task: Task) -> list[str]:
    figures = line.figures
    loss = figures.metric_loss
    bounds = f"{loss_text(loss.value, task)} ({100 * loss.low:z.2f} to {100 * loss.high:z.2f})"
    return [
        line.variant,
        number(figures.metric.value),
        interval(figures.metric),
        bounds,
        _flipped(line, task),
        size(figures.bytes),
        _memory(figures),
    ]


def _outlier_cells(line: LeaderboardLine) -> list[str]:
    found, rank = line.figures.outliers, line.figures.score_rank
    share = [f"{found.value:.1%}", f"{found.low:.1%} to {found.high:.1%}"] if found else ["", ""]
    return [line.variant, *share, f"{rank:.2f}" if rank is not None else ""]


def _speed_cells(line: LeaderboardLine) -> list[str]:
    figures = line.figures
    return [
        line.variant, f"{figures.p50_ms:.3g}", _p99(figures), times_text(figures.latency), _short(figures.rows_per_second),
        str(figures.batch_size), times_text(figures.throughput),
    ]  # fmt: skip


def _by_batch_size(lines: Sequence[LeaderboardLine]) -> Html:
    sizes = sorted(lines[0].rows_per_second)  # JSON sorts them as text
    rows = [
        [line.variant, *(_short(line.rows_per_second[batch]) for batch in sizes)] for line in lines
    ]
    return table(["variant", *map(str, sizes)], rows, numeric=[str(batch) for batch in sizes])


def _not_there(board: Leaderboard) -> Html:
    providers = [[_PROVIDERS[name], reason] for name, reason in board.absent.items()]
    return table(
        ["what", "why"], [*([name, reason] for name, reason in board.left_out.items()), *providers]
    )


def _attempts(attempts: Mapping[str, Sequence[Attempt]]) -> Html:
    rows = [
        [
            variant,
            attempt.calibrator,
            ", ".join(attempt.in_fp32) or "none",
            number(loss_of(attempt)),
        ]
        for variant, tried in attempts.items()
        for attempt in tried
    ]
    return table(["variant", "ranges", "layers left in fp32", "loss"], rows, numeric=["loss"])


def _notes(board: Leaderboard) -> Html:
    notes = [
        "All variants take turns in every round, so that what disturbs the machine disturbs all of them. A ratio is the median over the "
        "rounds, with the bounds between which the true median lies.",
        "A variant that the rounds show to be slower than fp32, for one row or for many, is never chosen; of those within the budget "
        "one is faster only where the lower bound says so.",
        "The loss is what counts against the budget. Its interval pairs the answers of both to the same rows.",
        "Called outliers are validation rows above the variant's own threshold; the order of its scores is their rank correlation with "
        "fp32's: far below 1, its is_outlier finds fewer strangers.",
        "Memory is what loading the graph and one batch add to a fresh process at most.",
    ]
    hardware = next(iter(board.choice.values())).hardware
    return join(
        [
            *(paragraph(note, "soft") for note in notes),
            paragraph(", ".join(f"{key}: {value}" for key, value in hardware.items()), "note"),
        ]
    )


def _cells(line: LeaderboardLine, task: Task) -> list[str]:
    found = line.figures
    return [
        line.variant, number(found.metric.value), loss_text(found.metric_loss.value, task), _flipped(line, task), f"{found.p50_ms:.3g}",
        _p99(found), _short(found.rows_per_second), times_text(found.throughput), size(found.bytes), _memory(found),
    ]  # fmt: skip


def _told(attempts: Sequence[Attempt]) -> str:
    best = min(attempts, key=loss_of)
    kept = f" and {', '.join(best.in_fp32)} in fp32" if best.in_fp32 else ""
    return f"{len(attempts)} ways of quantising were tried; with {best.calibrator} ranges{kept} it loses least, {number(loss_of(best))}"


def loss_text(loss: float, task: Task) -> str:
    """Accuracy points, or the relative growth of the RMSE: 0.005 is "0.50 points", or "0.50 %"."""
    return f"{100 * loss:z.2f} {'points' if is_classification(task) else '%'}"


def times_text(ratio: Ratio) -> str:
    """How many times as fast, with its bounds: "2.10 times (1.95 to 2.22)"."""
    return (
        f"{ratio.value:.2f} times ({ratio.low:.2f} to {ratio.high:.2f})"
        if ratio.low < ratio.high
        else f"{ratio.value:.2f} times"
    )


def _flipped(line: LeaderboardLine, task: Task) -> str:
    return str(line.figures.num_flipped) if is_classification(task) else ""


def _p99(figures: VariantFigures) -> str:
    return "" if figures.p99_ms is None else f"{figures.p99_ms:.3g}"


def _memory(figures: VariantFigures) -> str:
    return "" if figures.memory_bytes is None else size(figures.memory_bytes)


def _short(speed: float) -> str:
    return f"{float(f'{speed:.3g}'):,.0f}" if speed >= 10 else f"{speed:.2g}"
