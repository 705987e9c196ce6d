"""Load test: the search on simulated services, and the whole command on a real one."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from slipway.serving.load_test import card
from slipway.serving.load_test.candidates import (
    SettingsCandidate,
)
from slipway.serving.load_test.figures import figures_of
from slipway.serving.load_test.load import REFUSED, Answer
from slipway.serving.load_test.search import (
    LOWEST,
    RESOLUTION,
    LoadTrial,
    carried,
    lowest_missed,
    next_rate,
    on_grid,
)
from slipway.serving.load_test.trial_service import environment_of
from slipway.serving.load_test.tuner import Goal, Tried, Tuner
from slipway.serving.settings import read_settings
from slipway.system.errors import UnavailableError
from tests.serving.bundles import (
    certify,
    slow_classifier,
    with_golden_rows,
    write_bundle,
)
from tests.serving.conftest import MakeSettings
from tests.serving.load_test.tuned import P99_MS, PRESENT, Formula, tuned
from tests.serving.server import ROOT


def find(
    holds: Callable[[float], bool], guess: float, most: int = 40
) -> tuple[float | None, list[LoadTrial]]:
    """Return the rate that the search finds, and all rates that it tried."""
    trials: list[LoadTrial] = []
    while len(trials) < most and (rate := next_rate(trials, guess)) is not None:
        trials.append(LoadTrial(rate, holds(rate)))
    return carried(trials), trials


@pytest.mark.parametrize("limit", [0.7, 3.0, 97.0, 1234.0, 25_000.0])
@pytest.mark.parametrize("guess", [0.1, 1.0, 0.99, 30.0])
def test_search_finds_the_highest_rate_from_any_first_guess(limit: float, guess: float) -> None:
    found, trials = find(lambda rate: rate <= limit, guess * limit)
    assert found is not None
    assert limit / RESOLUTION < found <= limit
    assert len(trials) < 25


def test_sustained_rate_lies_below_every_missed_rate() -> None:
    found, _ = find(lambda rate: rate <= 90 or 140 <= rate <= 400, 100)
    assert found is not None
    assert found <= 90
    lucky = [
        LoadTrial(200, True),
        LoadTrial(100, False),
        LoadTrial(100, False),
        LoadTrial(50, True),
    ]
    assert (lowest_missed(lucky), carried(lucky)) == (100, 50)


def test_single_stall_does_not_lower_the_capacity() -> None:
    seen: list[float] = []

    def stalled_at_first(rate: float) -> bool:
        seen.append(rate)
        return len(seen) > 1 and rate <= 500

    found, _ = find(stalled_at_first, 100)
    assert seen[0] == seen[1] == on_grid(100)
    assert found is not None
    assert found > 400
    assert lowest_missed([LoadTrial(100, False)]) is None
    assert lowest_missed([LoadTrial(100, False), LoadTrial(100, False)]) == 100


def test_search_returns_none_if_no_rate_is_held() -> None:
    found, trials = find(lambda rate: False, 300)
    assert found is None
    assert min(trial.rate for trial in trials) >= LOWEST
    assert len(trials) < 40


def test_settings_with_the_highest_rate_win_and_headroom_is_their_surplus() -> None:
    carry = {
        SettingsCandidate(1, 2, 16): 200.0,
        SettingsCandidate(2, 1, 16): 400.0,
        SettingsCandidate(2, 1, 8): 500.0,
    }
    formula = Formula(lambda candidate: carry.get(candidate, 150.0))
    outcome = tuned(formula, Goal(P99_MS, 250, None))
    assert outcome.is_met
    assert outcome.best.candidate == SettingsCandidate(2, 1, 8)
    assert outcome.best.confirmed is not None
    assert 500 / RESOLUTION <= outcome.best.confirmed <= 500
    assert outcome.headroom == pytest.approx(outcome.best.confirmed / 250 - 1)
    assert [len(tried.rounds) for tried in outcome.all_tried if tried.load_rounds] == [3, 3]
    assert formula.most_at_once == 2
    assert "The goal is met" in card.verdict(outcome)


def test_difference_within_noise_keeps_the_present_settings() -> None:
    outcome = tuned(
        Formula(lambda candidate: 200.0 if candidate == PRESENT else 204.0), Goal(P99_MS, 100, None)
    )
    assert outcome.best.candidate == PRESENT
    clear = tuned(
        Formula(lambda candidate: 200.0 if candidate == PRESENT else 260.0), Goal(P99_MS, 100, None)
    )
    assert clear.best.candidate != PRESENT


def test_unreachable_goal_names_the_closest_result() -> None:
    formula = Formula(lambda candidate: 100.0)
    outcome = tuned(formula, Goal(P99_MS, 10_000, None))
    assert not outcome.is_met
    assert outcome.best.confirmed is not None
    assert 80 <= outcome.best.confirmed <= 100
    assert formula.highest_sent < 1000  # far beyond what is answered there is nothing to learn
    words = card.verdict(outcome)
    assert "cannot be met here" in words
    assert "429" in words
    assert f"the closest: {outcome.best.confirmed:,.1f} requests/s".lower() in words.lower()


def test_latency_goal_may_apply_to_a_number_of_callers_in_a_closed_loop() -> None:
    met = tuned(Formula(lambda candidate: 1000.0), Goal(P99_MS, None, 32))
    assert met.is_met
    assert met.headroom is None
    missed = tuned(Formula(lambda candidate: 200.0), Goal(P99_MS, None, 32))  # each waits 160 ms
    assert not missed.is_met
    assert "32 connections" in card.verdict(missed)


def test_model_slower_than_the_limit_sustains_no_rate() -> None:
    outcome = tuned(Formula(lambda candidate: 100.0, latency_ms=80), Goal(P99_MS, 10, None))
    assert outcome.best.confirmed is None
    assert "No rate was sustained" in card.verdict(
        outcome
    ) or "no rate was sustained" in card.verdict(outcome)


def test_rate_that_was_held_once_is_lowered_until_most_rounds_hold_it() -> None:
    formula = Formula(lambda candidate: 400.0)
    tuner = Tuner(formula, Goal(P99_MS, 50, None), 120, clock=lambda: formula.now)
    tried = Tried(PRESENT, most=1200, rate=1200)  # it was measured too high
    tuner._confirm([tried])
    assert tried.confirmed is not None
    assert 300 <= tried.confirmed <= 400
    assert all(found.holds(P99_MS) for found in tried.rounds)


def test_goal_rate_held_in_most_rounds_is_confirmed_without_further_rounds() -> None:
    formula = Formula(lambda candidate: 300.0)
    tuner = Tuner(formula, Goal(P99_MS, 50, None), 0.001, clock=lambda: formula.now)
    tried = Tried(PRESENT, most=5000, rate=5000)
    tuner._confirm([tried])
    assert tried.confirmed == 50
    missed = Tried(PRESENT, most=5000, rate=5000)
    Tuner(formula, Goal(P99_MS, 400, None), 0.001, clock=lambda: formula.now)._confirm([missed])
    assert missed.confirmed is None


@pytest.mark.parametrize("seconds", [30, 120, 600])
def test_search_ends_within_its_time_and_the_last_steps(seconds: float) -> None:
    formula = Formula(lambda candidate: 300.0)
    assert tuned(formula, Goal(P99_MS, 100, None), seconds, cores=16).seconds < 1.4 * seconds + 15


def test_hopeless_candidates_are_abandoned_and_failing_ones_skipped() -> None:
    formula = Formula(lambda candidate: 400.0 if candidate == PRESENT else 50.0)
    outcome = tuned(formula, Goal(P99_MS, 100, None))
    assert [tried.rate for tried in outcome.all_tried[1:3]] == [None, None]
    assert "less than half" in outcome.all_tried[1].problem

    def two_do_not_fit(candidate: SettingsCandidate) -> float:
        if candidate.workers > 1:
            raise UnavailableError("out of memory")
        return 400.0

    assert "out of memory" in [
        tried.problem for tried in tuned(Formula(two_do_not_fit), Goal(P99_MS, 100, None)).all_tried
    ]
    with pytest.raises(UnavailableError, match="out of memory"):
        tuned(Formula(two_do_not_fit), Goal(P99_MS, 100, None), present=SettingsCandidate(2, 1, 16))


def test_trial_service_shares_no_state_ports_or_keys(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    environment = {
        "SLIPWAY_KEYS": "keys",
        "SLIPWAY_ADMIN_PORT": "3001",
        "SLIPWAY_MONITORING": "false",
        "SLIPWAY_STATE": "elsewhere",
        "PATH": "/bin",
    }
    settings = make_settings(request_log_directory=tmp_path / "log")
    child = environment_of(settings, SettingsCandidate(2, 1, 8), environment, tmp_path / "own")
    assert child["SLIPWAY_STATE"] == str(tmp_path / "own" / "state")
    assert child["SLIPWAY_REQUEST_LOG_DIRECTORY"] == str(tmp_path / "own" / "request_log")
    assert (
        child["SLIPWAY_WORKERS"],
        child["SLIPWAY_NUM_THREADS"],
        child["SLIPWAY_MAX_BATCH_SIZE"],
    ) == ("2", "1", "8")
    assert (child["SLIPWAY_MONITORING"], child["SLIPWAY_BUNDLE"], child["PATH"]) == (
        "false",
        str(settings.bundle),
        "/bin",
    )
    assert not {"SLIPWAY_KEYS", "SLIPWAY_ADMIN_PORT"} & set(child)
    assert read_settings(environment=child).bundle == settings.bundle


def test_load_is_sustained_only_if_all_requests_get_responses_in_time() -> None:
    answers = [Answer(number, 0.0, 0.001 * (number + 1), 200, {}, b"") for number in range(100)]
    found = figures_of(answers, 2.0, 0.5, 50, None)
    assert (found.answered, found.rate, found.failed) == (100, 50, {})
    assert found.p50_ms == pytest.approx(51)
    assert found.p99_ms == pytest.approx(100)
    assert found.holds(100.5)
    assert not found.holds(99)
    broken = figures_of(
        [
            *answers,
            Answer(100, 0.0, 0.001, REFUSED, {}, b""),
            Answer(101, 0.0, 0.001, 429, {}, b""),
        ],
        2.0,
        0.5,
        50,
        None,
    )
    assert broken.failed == {"no answer": 1, "429": 1}
    assert not broken.holds(1000)
    assert not figures_of([], 2.0, 0.5, 50, None).holds(1000)


def tune(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command with the bundle in `folder`; its output is written below it."""
    paths = {
        "SLIPWAY_BUNDLE": "bundle",
        "SLIPWAY_CERTIFICATE": "certificate.json",
        "SLIPWAY_STATE": "state",
    }
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SLIPWAY_")
    }
    environment = inherited | {name: str(folder / path) for name, path in paths.items()} | variables
    command = [
        sys.executable,
        "-m",
        "slipway.serving.load_test",
        "--p99-ms",
        "5000",
        "--seconds",
        "4",
        "--out",
        str(folder),
        *arguments,
    ]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


def processes_with(text: str) -> list[int]:
    """Return the ids of processes that have `text` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # another user's, or it has just ended
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def test_check_for_leftover_service_processes_finds_one(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"],
        env=os.environ | {"MARK": str(tmp_path)},
        stdin=subprocess.PIPE,
    ) as process:
        for _ in range(500):
            if processes_with(str(tmp_path)):
                break
            time.sleep(0.02)  # until it is that command
        assert processes_with(str(tmp_path)) == [process.pid]
        process.communicate(b"\n")


@pytest.mark.nightly(seconds=26)
def test_tune_serving_measures_a_real_service_and_writes_its_card(tmp_path: Path) -> None:
    certify(
        tmp_path / "certificate.json",
        with_golden_rows(write_bundle(tmp_path / "bundle", slow_classifier(4))),
    )
    (tmp_path / "temporary").mkdir()
    ran = tune(
        tmp_path,
        "--requests-per-second",
        "10",
        "--apply",
        SLIPWAY_MONITORING="false",
        TMPDIR=str(tmp_path / "temporary"),
    )
    assert ran.returncode == 0, ran.stderr
    assert not list((tmp_path / "temporary").glob("slipway-tune-*"))
    assert processes_with(str(tmp_path)) == []
    content: dict[str, Any] = json.loads((tmp_path / "artifacts/capacity.json").read_bytes())
    assert content["is_met"], ran.stdout
    assert content["carried"]["rate"] >= 10
    assert content["at_load"]["rounds"] == 3
    assert content["at_load"]["failed"] == ""
    assert 0 < content["at_load"]["p50_ms"] <= content["at_load"]["p99_ms"] <= 5000
    assert re.fullmatch("[0-9a-f]{12}", content["model"]["version"])
    applied = dict(line.split("=") for line in (tmp_path / "serving.env").read_text().splitlines())
    assert applied == content["settings"]
    assert content["verdict"] in (tmp_path / "reports/capacity.md").read_text()
    assert not (tmp_path / "state").exists()  # the service in use has nothing of it


@pytest.mark.nightly(seconds=12)
def test_failed_measurement_prints_one_line_and_writes_no_card(tmp_path: Path) -> None:
    nothing = tune(tmp_path)
    assert nothing.returncode == 1
    assert re.fullmatch(r"\nerror: .*bundle\.json is missing.*\n", nothing.stderr)
    bundle = with_golden_rows(write_bundle(tmp_path / "bundle"))
    certify(tmp_path / "certificate.json", bundle)
    not_ready = tune(tmp_path, SLIPWAY_VARIANT="int8")
    assert not_ready.returncode == 1
    assert re.fullmatch(
        r"\nerror: the service with SLIPWAY_WORKERS=1 .* does not become ready: .*int8.*\n",
        not_ready.stderr,
    )
    (tmp_path / "sample").write_bytes(b"no image")
    refused = tune(tmp_path, "--samples", str(tmp_path / "sample"))
    assert refused.returncode == 1
    assert re.fullmatch(
        r"\nerror: the service refuses sample 1: 422 .*undecodable.*\n", refused.stderr
    )
    assert not (tmp_path / "artifacts").exists()
