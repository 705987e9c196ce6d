import re
from typing import Any

import pytest

from slipway.artifacts.bundle import Choice, Metric, VariantFigures
from slipway.artifacts.leaderboard import Attempt, Leaderboard, LeaderboardLine
from slipway.reports.pages.leaderboard_page import leaderboard_page, leaderboard_text


def figures(
    loss: float, throughput: float, verdict: str, p99_ms: float | None = 2.5
) -> VariantFigures:
    metric = {"value": 0.98 - loss, "low": 0.96, "high": 0.99, "confidence": 0.95, "rows": 260}
    ratio = {"value": throughput, "low": 0.9 * throughput, "high": 1.1 * throughput}
    content: dict[str, Any] = {
        "metric": metric,
        "metric_loss": metric | {"value": loss, "low": loss - 0.002, "high": loss + 0.002},
        "max_difference": 0.01,
        "num_flipped": 3,
        "batch_dependence": 0.0,
        "p50_ms": 1.234,
        "p99_ms": p99_ms,
        "rows_per_second": 4321.0,
        "batch_size": 64,
        "latency": ratio,
        "throughput": ratio,
        "bytes": 45_000_000,
        "memory_bytes": 90_000_000,
        "verdict": verdict,
    }
    return VariantFigures.model_validate(content)


@pytest.fixture
def board() -> Leaderboard:
    found = {
        "fp32": figures(0.0, 1.0, "the reference"),
        "int8": figures(0.004, 2.5, "chosen"),
        "fp16": figures(0.0, 0.4, "not meant for <cpu>", None),
    }
    choice = Choice(
        variant="int8",
        max_metric_loss=0.005,
        prefer="fastest",
        reason="It is <fast>.",
        figures=found,
        hardware={"cpu": "A & B"},
    )
    lines = [
        LeaderboardLine(
            variant=name,
            provider="cpu",
            is_meant_for=name != "fp16",
            flipped=["a"],
            rows_per_second={1: 900.0, 64: 4321.0},
            figures=line,
        )
        for name, line in found.items()
    ]
    attempts = [
        Attempt(range_method="minmax", in_fp32=[], metric_loss=None),
        Attempt(range_method="entropy", in_fp32=["conv_1"], metric_loss=0.004),
    ]
    return Leaderboard(
        task="image_classification",
        metric="accuracy",
        rows=260,
        lines=lines,
        choice={"cpu": choice},
        absent={"cuda": "no driver"},
        left_out={"int8_dynamic": "it reaches 4 %"},
        attempts={"int8": attempts},
    )


def test_the_leaderboard_page_shows_every_verdict_and_loads_nothing(board: Leaderboard) -> None:
    page = leaderboard_page(board)
    for text in (
        "Chosen on the CPU: int8",
        "not meant for &lt;cpu&gt;",
        "It is &lt;fast&gt;.",
        "A &amp; B",
        "no driver",
        "it reaches 4 %",
        "conv_1",
    ):
        assert text in page
    assert "0.40 points (0.20 to 0.60)" in page
    assert not re.search(r"https?://|<script|<link", page)
    assert page.count('class="range"') == 3, "a dot and whiskers for each variant"
    assert "Line: accuracy of fp32 on the validation rows." in page


def test_leaderboard_text_has_choices_and_attempts(board: Leaderboard) -> None:
    text = leaderboard_text(board)
    assert "cpu: int8 is chosen. It is <fast>." in text
    assert "no driver" not in text, "`verify` says it once"
    assert "int8_dynamic: left out, it reaches 4 %" in text
    assert (
        "int8: 2 attempts to quantize; the smallest loss, 0.0040, "
        "has entropy ranges and conv_1 in fp32" in text
    )
    assert re.search(r"^fp16 .* 1\.23 +4,320", text, re.MULTILINE), (
        "a p99 of too few calls is left empty"
    )


def test_the_leaderboard_does_not_write_a_tiny_gain_as_minus_zero(board: Leaderboard) -> None:
    found = figures(-1e-6, 1.0, "the reference")
    lines = [line.model_copy(update={"figures": found}) for line in board.lines]
    board = board.model_copy(update={"lines": lines})
    assert "-0.00" not in leaderboard_page(board) + leaderboard_text(board)


def test_the_leaderboard_page_says_why_no_row_is_flagged_as_ood(board: Leaderboard) -> None:
    assert "too few for a threshold" in leaderboard_page(board)


def test_leaderboard_text_names_a_variant_whose_ood_scores_lost_their_order(
    board: Leaderboard,
) -> None:
    share = {"value": 0.992, "low": 0.972, "high": 0.998, "confidence": 0.95, "rows": 260}

    def with_rank(rank: float | None) -> Leaderboard:
        found = board.lines[1].figures.model_copy(
            update={"score_rank": rank, "ood_fraction": Metric.model_validate(share)}
        )
        return board.model_copy(
            update={
                "lines": [
                    board.lines[0],
                    board.lines[1].model_copy(update={"figures": found}),
                    board.lines[2],
                ]
            }
        )

    warning = "cpu: int8 barely preserves the order of fp32's OOD scores (correlation 0.27)"
    assert warning in leaderboard_text(with_rank(0.27))
    assert "hardly" not in leaderboard_text(with_rank(0.93)) + leaderboard_text(with_rank(None))
    for text in ("99.2%", "97.2% to 99.8%", "0.27"):
        assert f">{text}</td>" in leaderboard_page(with_rank(0.27))


def test_a_leaderboard_survives_a_round_trip_through_json(board: Leaderboard) -> None:
    assert Leaderboard.model_validate_json(board.model_dump_json()) == board


def test_the_loss_of_a_numeric_target_is_relative_and_no_row_flips(board: Leaderboard) -> None:
    text = leaderboard_text(board.model_copy(update={"task": "image_regression", "metric": "rmse"}))
    assert "0.40 %" in text
    assert "points" not in text
