"""`slipway tune replicas`: the number of replicas for a load, from a capacity card."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipway.serving.load_test import replicas
from slipway.serving.load_test.replicas import Sizing, describe, main, read_card, require_model
from slipway.system.errors import UnavailableError

CONTENT: dict[str, Any] = {
    "format_version": 1,
    "date": "2026-11-26 15:00:00 +0000",
    "goal": {"p99_ms": 50.0, "rate": None, "connections": 32},
    "model": {"version": "f5da06a61851", "variant": "fp32", "provider": "cpu"},
    "settings": {"SLIPWAY_WORKERS": "2", "SLIPWAY_NUM_THREADS": "1"},
    "carried": {"rate": 100.0},
    "remarks": ["Plan with 70% of the capacity, 70.0 requests/s.", "The machine was busy."],
    "hardware": {"cores": 2, "cpu": "a processor"},
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "artifacts/capacity.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(CONTENT | changes))
    return path


@pytest.mark.parametrize(
    ("rate", "margin", "expected"),
    [(1, 0.3, 1), (70, 0.3, 1), (71, 0.3, 2), (480, 0.3, 7), (480, 0.0, 5), (90, 0.9, 9)],
)
def test_replicas_are_the_smallest_number_that_leaves_the_margin_free(
    rate: float, margin: float, expected: int
) -> None:
    sizing = Sizing(rate, 100.0, margin)
    assert sizing.replicas == expected
    assert sizing.load(expected) <= 1 - margin + 1e-9
    assert expected == 1 or sizing.load(expected - 1) > 1 - margin


def test_tune_replicas_prints_replicas_layout_and_remarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replicas, "ROOT", tmp_path)
    written(tmp_path)
    main(["--requests-per-second", "480", "--p99-ms", "100"])
    printed = capsys.readouterr().out
    assert "replicas  7, each with 68.6 requests/s: 69% of the 100.0 that one sustains" in printed
    assert "8 if one may fail or restart" in printed
    assert "SLIPWAY_WORKERS=2 SLIPWAY_NUM_THREADS=1" in printed
    assert "within 50 ms" in printed
    assert "note      The machine was busy." in printed
    assert "Plan with" not in printed  # the margin of this command replaces it


def test_read_card_refuses_a_card_measured_for_a_higher_latency_goal(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_card(path, 50)["carried"] == {"rate": 100.0}
    with pytest.raises(UnavailableError, match=r"within 50 ms, expected one within 30 ms or less"):
        read_card(path, 30)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": 2}, "format version 2, expected 1"),
        ({"carried": {"rate": None}}, "no rate was sustained within 50 ms"),
    ],
)
def test_a_card_without_a_usable_capacity_is_refused_with_what_to_do(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnavailableError, match=words) as caught:
        read_card(written(tmp_path, **changes), 50)
    assert "slipway tune serving" in str(caught.value)


def test_missing_damaged_or_foreign_capacity_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"capacity\.json is missing: no capacity was"):
        read_card(tmp_path / "capacity.json", 50)
    path = written(tmp_path)
    path.write_text("{")
    with pytest.raises(UnavailableError, match="is not JSON"):
        read_card(path, 50)
    require_model(CONTENT, "f5da06a61851")
    with pytest.raises(UnavailableError, match="those of model f5da06a61851, expected other"):
        require_model(CONTENT, "other")


@pytest.mark.parametrize("arguments", [["0"], ["ten"], ["10", "--margin", "0.95"], []])
def test_tune_replicas_refuses_wrong_arguments(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--requests-per-second", *arguments] if arguments else []
    with pytest.raises(SystemExit):
        main(given)
    assert "xpected" in capsys.readouterr().err


def test_one_replica_is_described_with_its_load() -> None:
    text = describe(CONTENT, Sizing(10.0, 100.0, 0.3), 50.0)
    assert "replicas  1, each with 10.0 requests/s: 10% of the 100.0" in text
