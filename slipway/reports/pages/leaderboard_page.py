"""Writes the leaderboard as text and as `reports/leaderboard.html`."""

from collections.abc import Mapping, Sequence

from slipway.artifacts.bundle import Choice, Ratio, VariantFigures
from slipway.artifacts.leaderboard import Attempt, Leaderboard, LeaderboardLine
from slipway.kinds.registry import Task, kind_of
from slipway.metrics.uncertainty import MIN_SCORE_RANK
from slipway.reports.console import interval, number, size, text_table
from slipway.reports.pages.html_page import Html, page, paragraph, section, table, tiles
from slipway.reports.pages.intervals import IntervalRow, interval_chart

_PROVIDERS = {"cpu": "CPU", "cuda": "CUDA"}
_NOTES = (
    "All variants take turns in every round, so that a disturbance of the machine affects all of "
    "them. A ratio is the median over the rounds, with the bounds of the true median.",
    "A variant that the rounds show to be slower than fp32, for one row or for many, is never "
    "chosen. Among those within the budget, one counts as faster only if its lower bound says so.",
    "The loss counts against the budget. Its interval pairs both answers to the same rows.",
    "Rows above the variant's own threshold are flagged as OOD. The order of scores is the rank "
    "correlation of its OOD scores with fp32's: far below 1, it detects fewer unusual inputs.",
    "Memory is the most that loading the graph and running one batch add to a fresh process.",
)


def leaderboard_text(board: Leaderboard) -> str:
    """Format a table per provider, the reasons for each choice, and missing variants as text.

    A provider without a GPU is only on the page: `verify` says in one line what did not run.
    """
    names = ("loss", "flipped", "p50 ms", "p99 ms", "rows/s", "times fp32", "size", "memory")
    parts = []
    for provider in board.choice:
        rows = [_row(line, board.task) for line in board.lines_on(provider)]
        parts.append(text_table([provider, board.metric, *names], rows))
    for provider, choice in board.choice.items():
        parts.append(f"{provider}: {choice.variant} is chosen. {choice.reason}")
        if choice.variant != "fp32":  # else the reason has them
            verdicts: dict[str, list[str]] = {}
            for line in board.lines_on(provider):
                if line.variant not in ("fp32", choice.variant):
                    verdicts.setdefault(line.figures.verdict, []).append(line.variant)
            parts += [f"  {', '.join(names)}: {verdict}" for verdict, names in verdicts.items()]
    for line in board.lines:
        rank = line.figures.score_rank
        if rank is not None and rank < MIN_SCORE_RANK:
            parts.append(
                f"{line.provider}: {line.variant} barely preserves the order of fp32's OOD scores "
                f"(correlation {rank:.2f}): it detects fewer unusual inputs"
            )
    parts += [f"{variant}: left out, {reason}" for variant, reason in board.left_out.items()]
    for variant, attempts in board.attempts.items():
        best = min(attempts, key=lambda attempt: attempt.loss)
        in_fp32 = f" and {', '.join(best.in_fp32)} in fp32" if best.in_fp32 else ""
        parts.append(
            f"{variant}: {len(attempts)} attempts to quantize; the smallest loss, "
            f"{number(best.loss)}, has {best.range_method} ranges{in_fp32}"
        )
    return "\n".join(parts)


def leaderboard_page(board: Leaderboard) -> str:
    """Return the HTML page of the leaderboard."""
    sections: list[Html | None] = []
    for provider, choice in board.choice.items():
        name, lines = _PROVIDERS[provider], board.lines_on(provider)
        sections += [
            _choice(name, choice, lines, board.task),
            _answers(name, lines, board),
            _speed(name, lines),
        ]
    absent = {_PROVIDERS[provider]: reason for provider, reason in board.absent.items()}
    missing = [[name, reason] for name, reason in (board.left_out | absent).items()]
    shown = section("Requested but missing", table(["what", "why"], missing))
    hardware = next(iter(board.choice.values())).hardware
    machine = ", ".join(f"{key}: {value}" for key, value in hardware.items())
    notes = [paragraph(note, "soft") for note in _NOTES]
    sections += [
        shown if missing else None,
        section("Attempts for int8", _attempts(board.attempts)) if board.attempts else None,
        section("Method", *notes, paragraph(machine, "note")),
    ]
    about = f"{board.metric} on {board.rows:,} validation rows; speed on this machine"
    return page("Leaderboard of variants", about, sections)


def _choice(name: str, choice: Choice, lines: Sequence[LeaderboardLine], task: Task) -> Html:
    figures = choice.figures[choice.variant]
    loss, most = (
        loss_text(value, task) for value in (figures.metric_loss.value, choice.max_metric_loss)
    )
    speed, throughput = _short(figures.rows_per_second), times_text(figures.throughput)
    boxes = [
        ("rows a second", speed, f"{throughput} fp32's"),
        ("one row", f"{figures.p50_ms:.3g} ms", f"{times_text(figures.latency)} as fast"),
        ("loss", loss, f"at most {most}"),
        ("file", size(figures.bytes), ""),
    ]
    verdicts = [[line.variant, line.figures.verdict] for line in lines]
    return section(
        f"Chosen on the {name}: {choice.variant}",
        tiles(boxes),
        paragraph(choice.reason, "note"),
        table(["variant", "verdict"], verdicts),
    )


def _answers(name: str, lines: Sequence[LeaderboardLine], board: Leaderboard) -> Html:
    columns = ["variant", board.metric, "interval", "loss against fp32"]
    columns += ["flipped rows", "size", "memory"]
    rows, ood_rows = [], []
    for line in lines:
        figures, loss = line.figures, line.figures.metric_loss
        bounds = f"({100 * loss.low:z.2f} to {100 * loss.high:z.2f})"
        rows.append(
            [
                line.variant,
                number(figures.metric.value),
                interval(figures.metric),
                f"{loss_text(loss.value, board.task)} {bounds}",
                _flipped(figures, board.task),
                size(figures.bytes),
                _memory(figures),
            ]
        )
        ood, rank = figures.ood_fraction, figures.score_rank
        flagged = [f"{ood.value:.1%}", f"{ood.low:.1%} to {ood.high:.1%}"] if ood else ["", ""]
        ood_rows.append([line.variant, *flagged, "" if rank is None else f"{rank:.2f}"])
    ood_columns = ["variant", "flagged as OOD", "interval", "order of scores"]
    values = {line.variant: line.figures.metric.value for line in lines}
    intervals = {
        line.variant: IntervalRow(line.figures.metric, line=values.get("fp32")) for line in lines
    }
    has_threshold = any(line.figures.ood_fraction for line in lines)
    text = "No row is flagged as OOD: the validation rows were too few for a threshold."
    return section(
        f"Answers on the {name}",
        interval_chart(intervals, f"{board.metric} of fp32 on the validation rows"),
        table(columns, rows, numeric=[columns[1], *columns[4:]]),
        table(ood_columns, ood_rows, numeric=ood_columns[1:]),
        None if has_threshold else paragraph(text, "note"),
    )


def _speed(name: str, lines: Sequence[LeaderboardLine]) -> Html:
    columns = ["variant", "p50 ms", "p99 ms", "one row against fp32"]
    columns += ["rows/s", "batch", "rows/s against fp32"]
    sizes = sorted(lines[0].rows_per_second)  # JSON sorts them as text
    rows, by_size = [], []
    for line in lines:
        found = line.figures
        rows.append(
            [
                line.variant,
                f"{found.p50_ms:.3g}",
                _p99(found),
                times_text(found.latency),
                _short(found.rows_per_second),
                str(found.batch_size),
                times_text(found.throughput),
            ]
        )
        by_size.append([line.variant, *(_short(line.rows_per_second[batch]) for batch in sizes)])
    return section(
        f"Speed on the {name}",
        table(columns, rows, numeric=columns[1:]),
        paragraph("Rows per second, by batch size", "note"),
        table(["variant", *map(str, sizes)], by_size, numeric=[str(batch) for batch in sizes]),
    )


def _attempts(attempts: Mapping[str, Sequence[Attempt]]) -> Html:
    rows = [
        [variant, one.range_method, ", ".join(one.in_fp32) or "none", number(one.loss)]
        for variant, tried in attempts.items()
        for one in tried
    ]
    return table(["variant", "ranges", "layers left in fp32", "loss"], rows, numeric=["loss"])


def _row(line: LeaderboardLine, task: Task) -> list[str]:
    found = line.figures
    return [
        line.variant,
        number(found.metric.value),
        loss_text(found.metric_loss.value, task),
        _flipped(found, task),
        f"{found.p50_ms:.3g}",
        _p99(found),
        _short(found.rows_per_second),
        times_text(found.throughput),
        size(found.bytes),
        _memory(found),
    ]


def loss_text(loss: float, task: Task) -> str:
    """Format a loss: 0.005 is "0.50 points" of accuracy, or "0.50 %" growth of the RMSE."""
    return f"{100 * loss:z.2f} {'points' if kind_of(task).target.headline_is_fraction else '%'}"


def times_text(ratio: Ratio) -> str:
    """Format a speed-up with its bounds: "2.10 times (1.95 to 2.22)"."""
    bounds = f" ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.low < ratio.high else ""
    return f"{ratio.value:.2f} times{bounds}"


def _flipped(figures: VariantFigures, task: Task) -> str:
    return str(figures.num_flipped) if kind_of(task).target.has_classes else ""


def _p99(figures: VariantFigures) -> str:
    return "" if figures.p99_ms is None else f"{figures.p99_ms:.3g}"


def _memory(figures: VariantFigures) -> str:
    return "" if figures.memory_bytes is None else size(figures.memory_bytes)


def _short(speed: float) -> str:
    return f"{float(f'{speed:.3g}'):,.0f}" if speed >= 10 else f"{speed:.2g}"
