"""The capacity card lists what was tried, and its settings change only their own lines."""

import json
from pathlib import Path

from slipway.serving.load_test import card
from slipway.serving.load_test.tuner import Goal
from tests.serving.load_test.tuned import P99_MS, PRESENT, Formula, tuned

MODEL = {
    "model_version": "3f9c1b2a4d5e",
    "execution": {
        "actual": {
            "backend": "onnxruntime",
            "provider": "cpu",
            "variant": "fp32",
            "precision": "fp32",
        }
    },
}


def test_applying_settings_changes_only_their_own_lines_of_serving_env(tmp_path: Path) -> None:
    path = tmp_path / "serving.env"
    settings = PRESENT.settings()
    assert card.with_settings(path, settings) == card.environment_lines(settings)
    path.write_text(
        "# ours\nSLIPWAY_WORKERS=9\nexport SLIPWAY_NUM_THREADS=9\nSLIPWAY_MONITORING=false\n"
    )
    written = card.with_settings(path, settings)
    assert written.splitlines()[:2] == ["# ours", "SLIPWAY_MONITORING=false"]
    assert "9" not in written
    path.write_text(written)
    assert card.with_settings(path, settings) == written


def test_capacity_page_lists_all_candidates_and_warns_of_a_busy_machine_or_client() -> None:
    outcome = tuned(Formula(lambda candidate: 300.0), Goal(P99_MS, 100, None))
    quiet, busy = card.machine(0.1, 2), card.machine(5.0, 2)
    content = card.card(outcome, MODEL, "1: a sample", quiet)
    json.dumps(content, allow_nan=False)
    text = card.page(content)
    assert text.count("\n| 1 | ") + text.count("\n| 2 | ") == len(outcome.all_tried)
    assert card.environment_lines(outcome.best.candidate.settings()).strip() in text
    assert "busy before" not in text
    assert "busy before" in card.page(card.card(outcome, MODEL, "1: a sample", busy))
    assert "near its limit" not in text
