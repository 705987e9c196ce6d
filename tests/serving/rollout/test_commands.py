"""The commands `abort` and `rollback`: a late command never replaces a healthy stable model."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.serving.rollout import commands
from slipway.serving.rollout.__main__ import main
from slipway.serving.rollout.history import change_rollout
from slipway.serving.rollout.state import Model, Rollout, RolloutError, read_rollout
from slipway.serving.settings import Settings
from slipway.serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import canary_of, error_of, is_shadowing
from tests.serving.rolling import (
    failing_classifier,
    propose,
    run,
    scaled_classifier,
    serves,
    settle,
    write_candidate,
)
from tests.serving.server import ROOT, environment, running, until

JSON = {"content-type": "application/json"}
BEFORE, STABLE, CANDIDATE = (
    Model(folder=f"{letter * 12}-{letter * 8}", version=letter * 12, digest=letter * 64)
    for letter in "abc"
)


@pytest.fixture
def returned(make_settings: MakeSettings) -> Settings:
    """Return settings whose state has a canary that was just rolled back.

    The state also has a stable model and a previous one.
    """
    settings = make_settings()
    settings.state.mkdir(parents=True, exist_ok=True)

    def change(rollout: Rollout) -> Rollout:
        served = rollout.changed(stable=STABLE, history=[BEFORE])
        tried = served.changed(
            candidate=commands._candidate(served, "canary", CANDIDATE, replaces=STABLE)
        )
        return tried.ended("rolled_back", "it failed more often than the stable model")

    change_rollout(settings.state, change)
    return settings


def went_at(settings: Settings) -> float:
    return read_rollout(settings.state).events[-1].time


@pytest.mark.parametrize(
    ("seconds", "is_refused"), [(0.0, True), (-5.0, True), (599.0, True), (600.0, False)]
)
def test_rollback_without_a_version_is_refused_for_ten_minutes_after_a_candidate_ended(
    returned: Settings, seconds: float, is_refused: bool
) -> None:
    moment = went_at(returned) + seconds
    if is_refused:
        with pytest.raises(RolloutError) as refused:
            commands.rollback(returned, clock=lambda: moment)
        message = str(refused.value)
        assert f"{CANDIDATE.version} rolled back at" in message
        assert "it failed more often than the stable model" in message
        assert f"{STABLE.version} is served, and would be replaced by {BEFORE.version}" in message
        assert message.endswith(f"name it: rollback {STABLE.version}")
    else:
        commands.rollback(returned, clock=lambda: moment)
    assert read_rollout(returned.state).stable == (STABLE if is_refused else BEFORE)


def test_rollback_of_an_ended_candidate_never_changes_anything(
    returned: Settings,
) -> None:
    moment = went_at(returned) + 7200
    with pytest.raises(
        RolloutError,
        match=f"^{CANDIDATE.version} is not served; {STABLE.version} is. "
        f"{CANDIDATE.version} rolled back at",
    ):
        commands.rollback(returned, CANDIDATE.version, clock=lambda: moment)
    assert read_rollout(returned.state).stable == STABLE


def test_rollback_of_the_stable_version_returns_to_the_previous_model_at_once(
    returned: Settings,
) -> None:
    rollout = commands.rollback(returned, STABLE.version)
    assert (rollout.stable, rollout.candidate) == (BEFORE, None)
    with pytest.raises(RolloutError, match=f"{STABLE.version} is not served; {BEFORE.version} is"):
        commands.rollback(returned, STABLE.version)  # a second operator who saw the same


def test_rollback_of_an_ended_candidates_version_is_refused_for_ten_minutes(
    make_settings: MakeSettings,
) -> None:
    settings = make_settings()
    settings.state.mkdir(parents=True, exist_ok=True)
    twin = STABLE.model_copy(
        update={"folder": f"{STABLE.version}-{'d' * 8}"}
    )  # the same bundle with another certificate

    def change(rollout: Rollout) -> Rollout:
        served = rollout.changed(stable=STABLE, history=[BEFORE])
        tried = served.changed(
            candidate=commands._candidate(served, "canary", twin, replaces=STABLE)
        )
        return tried.ended("rolled_back", "a worker died with it")

    change_rollout(settings.state, change)
    with pytest.raises(
        RolloutError,
        match=f"Nothing was changed. To stop serving {STABLE.version}, "
        f"name it: rollback {STABLE.folder}$",
    ):
        commands.rollback(settings, STABLE.version)
    assert read_rollout(settings.state).stable == STABLE
    assert commands.rollback(settings, STABLE.folder).stable == BEFORE


def test_abort_without_a_candidate_reports_the_served_model_and_the_last_outcome(
    returned: Settings,
) -> None:
    with pytest.raises(
        RolloutError,
        match=f"no candidate to end; {STABLE.version} is served. "
        f"{CANDIDATE.version} rolled back at",
    ):
        commands.abort(returned)
    assert read_rollout(returned.state).stable == STABLE


@pytest.mark.usefixtures("unrehearsed")
def test_abort_and_rollback_by_version_end_only_the_candidate(
    certified: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    first, second = (
        write_candidate(certified / str(factor), scaled_classifier(factor)) for factor in (2, 3)
    )
    stable, candidate = load_bundle(first).version, load_bundle(second).version

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "deploy", first)
        await serves(worker, stable)
        for mode, order in [
            ("canary", {"command": "abort"}),
            ("shadow", {"command": "abort"}),
            ("canary", {"command": "rollback", "version": candidate}),
        ]:
            await propose(worker, mode, second)
            await settle(worker, lambda: is_shadowing(worker) or canary_of(worker) is not None)
            other = await client.post(
                "/rollout", json={"command": "rollback", "version": stable}, headers=JSON
            )
            assert (
                f"{stable} is not the candidate, which is {candidate}" in error_of(other)["message"]
            )
            assert (await client.post("/rollout", json=order, headers=JSON)).status_code == 202
            await settle(worker, lambda: not is_shadowing(worker) and canary_of(worker) is None)
            for late in (order, {"command": "rollback"}):  # of a second operator, or a second click
                answer = await client.post("/rollout", json=late, headers=JSON)
                assert error_of(answer)["code"] == "rollout_refused"
                assert "Nothing was changed." in error_of(answer)["message"]
            assert (await client.get("/rollout")).json()["stable"] == stable
        version = {"command": "abort", "version": candidate}
        assert (
            error_of(await client.post("/rollout", json=version, headers=JSON))["code"]
            == "rollout_invalid"
        )
        await asyncio.to_thread(commands.rollback, settings, stable)
        await serves(worker, load_bundle(settings.bundle).version)

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_a_late_rollback_command_keeps_the_stable_model(
    certified: Path,
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = make_settings()
    monkeypatch.setattr("os.nice", lambda by: 0)
    monkeypatch.setattr("slipway.serving.rollout.__main__.read_settings", make_settings)
    good, bad = (
        write_candidate(certified / "good", scaled_classifier(2)),
        write_candidate(certified / "bad", failing_classifier(0)),
    )
    stable, candidate = load_bundle(good).version, load_bundle(bad).version

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "deploy", good)
        await serves(worker, stable)
        change_rollout(settings.state, lambda rollout: _tried(rollout, candidate))
        for arguments in (["rollback"], ["rollback", candidate], ["abort"]):
            with pytest.raises(SystemExit) as ended:
                await asyncio.to_thread(main, arguments)
            assert ended.value.code == 1
            assert "Nothing was changed." in capsys.readouterr().err
        assert worker.model is not None
        assert worker.model.version == stable
        await asyncio.to_thread(main, ["rollback", stable])
        await serves(worker, load_bundle(settings.bundle).version)

    run(settings, work)


def _tried(rollout: Rollout, version: str) -> Rollout:
    return rollout.with_event("rolled_back", version, "worker 1 died with it")


@pytest.mark.nightly(seconds=14)
def test_after_an_automatic_rollback_late_commands_do_not_replace_the_stable_model(
    certified: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    first, second = (
        write_candidate(certified / str(factor), scaled_classifier(factor)) for factor in (2, 3)
    )
    stable, candidate = load_bundle(first).version, load_bundle(second).version

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        typed = [sys.executable, "-m", "slipway.serving.rollout", *arguments]
        return subprocess.run(
            typed, cwd=ROOT, env=environment(certified), capture_output=True, text=True, timeout=120
        )

    with running(certified) as server:
        server.wait()
        assert command("deploy", str(first)).returncode == 0
        assert command("canary", str(second), "--steps", "50,100").returncode == 0
        os.kill(server.worker(), signal.SIGKILL)
        until(lambda: read_rollout(settings.state).candidate is None)
        for order in (["rollback"], ["rollback", candidate], ["abort"]):
            late = command(*order)
            assert (late.returncode, "Nothing was changed." in late.stderr) == (1, True)
        assert f"{candidate} rolled back at" in command("rollback").stderr
        until(
            lambda: (
                [worker["serving"] for worker in json.loads(command("status").stdout)["workers"]]
                == [stable]
            )
        )
        done = command("rollback", stable)
        assert done.returncode == 0, done.stderr
        assert (
            json.loads(command("status").stdout)["stable"] == load_bundle(settings.bundle).version
        )
