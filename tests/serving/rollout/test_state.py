"""The state of rollouts: commands, invalid or unwritable files, and `POST /rollout`."""

import asyncio
import json
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.serving.requests.payload import Payload
from slipway.serving.rollout import commands
from slipway.serving.rollout.__main__ import main
from slipway.serving.rollout.history import change_rollout
from slipway.serving.rollout.rehearsal import rehearse
from slipway.serving.rollout.state import (
    Allowed,
    Model,
    RolloutError,
    RolloutPlan,
    read_rollout,
)
from slipway.serving.rollout.store import command_lock, settings_of
from slipway.serving.worker import ModelWorker
from slipway.system.errors import LockedError
from tests.serving.bundles import LABELS
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import (
    canary_of,
    error_of,
    full_worker,
    is_shadowing,
    metric,
    reconciler_of,
)
from tests.serving.rolling import (
    PICTURES,
    last_event,
    low_accuracy,
    propose,
    run,
    scaled_classifier,
    settle,
    settle_evidence,
    write_candidate,
)

FAULTS = 'slipway_monitoring_errors_total{part="rollout"}'


@pytest.mark.process
def test_without_a_worker_deploy_checks_the_model_and_the_next_start_serves_it(
    certified: Path, new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    with pytest.raises(RolloutError, match="no worker follows"):
        commands.propose(settings, "canary", new_bundle)
    rollout = commands.propose(settings, "deploy", new_bundle)  # with a real rehearsal
    assert rollout.stable
    assert (rollout.candidate, rollout.stable.version) == (None, load_bundle(new_bundle).version)
    worse = write_candidate(certified / "worse", scaled_classifier(3), **low_accuracy(0.5))
    with pytest.raises(RolloutError, match=r"its accuracy is 0\.5"):
        commands.propose(settings, "deploy", worse)
    assert commands.wait(settings, 0.0) == (read_rollout(settings.state), [])
    with pytest.raises(
        RolloutError, match=f"refused at .* name it: rollback {rollout.stable.version}"
    ):
        commands.rollback(
            settings
        )  # "the deployment failed, so roll back" would replace the model that it left in its place
    # The copy of SLIPWAY_BUNDLE that was made before.
    assert commands.rollback(settings, rollout.stable.version).stable is not None


def test_a_model_that_kills_its_process_is_refused_with_the_signal(
    certified: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (certified / "sitecustomize.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    )
    monkeypatch.setenv("PYTHONPATH", str(certified))
    with pytest.raises(RolloutError, match="was ended by SIGSEGV while it was loaded"):
        rehearse(make_settings())


@pytest.mark.usefixtures("unrehearsed")
def test_options_of_the_command_reach_the_proposed_candidate(
    certified: Path,
    new_bundle: Path,
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr("os.nice", lambda by: 0)
    monkeypatch.setattr("slipway.serving.rollout.__main__.read_settings", make_settings)
    proposed: list[dict[str, Any]] = []
    propose_it = commands.propose

    def propose(*arguments: Any, **options: Any) -> Any:
        proposed.append(options)
        return propose_it(*arguments, **options)

    monkeypatch.setattr(commands, "propose", propose)
    main(["deploy", str(new_bundle), "--allow-metric-loss", "any", "--allow-other-contract"])
    output, remarks = capsys.readouterr()
    state = make_settings().state
    assert (
        output
        == f"{load_bundle(new_bundle).version} swapped: no worker runs; the next start serves it "
        f"(state: {state})\n"
    )
    assert f"no worker follows {state}" in remarks
    assert proposed[0]["allowed"] == Allowed(metric_loss=None, other_contract=True)
    typed = [
        "--steps",
        "2.5,50",
        "--hold-seconds",
        "0",
        "--hold-requests",
        "7",
        "--slow-ms",
        "20",
        "--allow-disagreement",
        "0.2",
    ]
    for arguments, reason in [
        (["canary", str(new_bundle), *typed], "no worker follows"),
        (["promote"], "there is no candidate"),
        (
            ["deploy", str(certified / "nothing")],
            f"{certified / 'nothing'} is not a bundle",
        ),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 1
        remarks = capsys.readouterr().err
        assert reason in remarks
        assert not re.search(
            "SLIPWAY_BUNDLE at one|dvc repro", remarks
        )  # it is the order that was wrong
    assert proposed[1]["plan"] == RolloutPlan(
        steps=(0.025, 0.5), hold_s=0.0, hold_requests=7, slow_s=0.02
    )
    assert proposed[1]["allowed"].disagreement == 0.2
    for steps in ("0,50", "abc", "50,20", "50,101", "0.5,1.0"):
        with pytest.raises(SystemExit):
            main(["canary", str(new_bundle), "--steps", steps])
        assert re.search(f"found '{steps}', .*expected .*percentages", capsys.readouterr().err)
    main(["status"])
    output, remarks = capsys.readouterr()
    status = json.loads(output)
    assert (status["state"], status["stable"], status["workers"]) == (
        str(state),
        load_bundle(new_bundle).version,
        [],
    )
    assert f"no worker follows {state}" in remarks


def test_rollout_command_without_slipway_state_warns_of_the_default(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.nice", lambda by: 0)
    monkeypatch.setattr("slipway.serving.rollout.__main__.read_settings", make_settings)
    for is_set in (False, True):
        if is_set:
            monkeypatch.setenv("SLIPWAY_STATE", str(make_settings().state))
        else:
            monkeypatch.delenv("SLIPWAY_STATE", raising=False)
        main(["reset"])
        output, remarks = capsys.readouterr()
        assert f"(state: {make_settings().state})" in output
        assert ("SLIPWAY_STATE is not set" in remarks) == (not is_set)


def test_a_command_with_a_running_worker_prints_no_warning(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.nice", lambda by: 0)
    monkeypatch.setattr("slipway.serving.rollout.__main__.read_settings", make_settings)

    async def work(client: Any, worker: ModelWorker) -> None:
        await asyncio.to_thread(main, ["status"])

    run(make_settings(), work)
    output, remarks = capsys.readouterr()
    assert (len(json.loads(output)["workers"]), remarks) == (1, "")


async def send_feedback(client: Any, answers: list[tuple[str, str]], *, wrong: bool) -> int:
    """Send labels until all requests are stored. Returns the number of joined labels."""
    labels = [
        {"request_id": one, "ground_truth": LABELS[LABELS.index(label) - wrong]}
        for one, label in answers
    ]
    joined: set[str] = set()
    for _ in range(100):
        response = await client.post(
            "/feedback", json={"feedback": labels}, headers={"content-type": "application/json"}
        )
        joined |= {
            label["request_id"]
            for label, result in zip(labels, response.json()["feedback"], strict=True)
            if result["joined"]
        }
        if len(joined) == len(labels):
            break
        await asyncio.sleep(0.1)
    return len(joined)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_wrong_answers_by_feedback_roll_a_canary_back(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    versions = [load_bundle(path).version for path in (make_settings().bundle, new_bundle)]

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "canary", new_bundle, plan=RolloutPlan(steps=(0.1, 1.0)))
        await settle(worker, lambda: getattr(canary_of(worker), "fraction", 0) > 0)
        asked: dict[str, list[tuple[str, str]]] = {version: [] for version in versions}
        while len(asked[versions[1]]) < 20:
            answer = (await client.post("/predict", content=PICTURES[0])).json()
            asked[answer["model_version"]].append((answer["request_id"], answer["label"]))
        assert len(asked[versions[0]]) > 40
        last = (await client.post("/predict", content=PICTURES[0])).json()
        # Once this one is joined, all earlier requests are recorded as well.
        await send_feedback(client, [(last["request_id"], last["label"])], wrong=False)
        reconciler_of(worker).note_wrong("of a third model")
        # Only the candidate's own errors roll it back.
        assert await send_feedback(client, asked[versions[0]][:40], wrong=True) == 40
        await settle_evidence(worker)
        assert canary_of(worker) is not None
        assert await send_feedback(client, asked[versions[1]], wrong=True) == 20
        await settle(worker, lambda: last_event(worker)[0] == "rolled_back")
        assert last_event(worker)[1].startswith(
            "by feedback its answers are wrong more often than the stable model's: "
        )
        assert re.search(r": (1[0-9]|20) of \d+ of its requests, 40 of", last_event(worker)[1])

    run(make_settings(), work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_a_second_candidate_is_refused_while_one_is_running(
    certified: Path, new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "shadow", new_bundle)
        with pytest.raises(
            RolloutError, match=r"is being rolled out \(shadow, .*`promote` or `abort` it first"
        ):
            await propose(
                worker, "deploy", write_candidate(certified / "other", scaled_classifier(3))
            )
        with pytest.raises(RolloutError, match="is being rolled out"):
            commands.reset(settings)
        await settle(worker, lambda: is_shadowing(worker))
        await asyncio.to_thread(commands.promote, settings)
        await settle(
            worker,
            lambda: (
                worker.model is not None and worker.model.version == load_bundle(new_bundle).version
            ),
        )
        assert last_event(worker)[0] == "swapped"
        with pytest.raises(RolloutError, match="there is no candidate"):
            commands.promote(settings)

    run(settings, work)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "has format version None"),
        ('{"format_version": 9}', "has format version 9"),
        ('{"format_version": 1}', "is not a valid Rollout"),
    ],
)
def test_an_invalid_state_is_reported_and_the_model_continues_to_serve(
    make_settings: MakeSettings, content: str, reason: str
) -> None:
    settings = make_settings()

    async def spoilt(client: Any, worker: ModelWorker) -> None:
        (settings.state / "rollout.json").write_text(content)
        await settle(worker, lambda: metric(worker, FAULTS) > 0)
        assert (await client.post("/predict", content=PICTURES[0])).status_code == 200
        (settings.state / "rollout.json").unlink()
        change_rollout(
            settings.state, lambda rollout: rollout.with_event("refused", "x", "to be counted")
        )
        await settle(
            worker, lambda: metric(worker, 'slipway_swaps_total{outcome="refused"}') == 1
        )  # it follows again

    run(settings, spoilt)
    (settings.state / "rollout.json").write_text(content)
    with pytest.raises(RolloutError, match=reason):
        read_rollout(settings.state)


def test_a_service_without_the_rolled_out_model_is_not_ready(
    make_settings: MakeSettings,
) -> None:
    """It reports why, and becomes ready once the state is corrected."""
    settings = make_settings()
    gone = Model(folder="0123456789ab-01234567", version="0123456789ab", digest="0" * 64)
    change_rollout(settings.state, lambda rollout: rollout.changed(stable=gone))

    async def work(client: Any, worker: ModelWorker) -> None:
        response = await client.get("/readyz")
        assert response.status_code == 503
        assert "python -m slipway.serving.rollout reset" in error_of(response)["message"]
        await asyncio.to_thread(commands.reset, settings)
        await settle(worker, lambda: worker.model is not None)
        assert (await client.get("/readyz")).status_code == 200

    run(settings, work)


def test_reports_of_dead_workers_are_removed(make_settings: MakeSettings) -> None:
    settings = make_settings()

    async def nothing(client: Any, worker: ModelWorker) -> None:
        (own,) = (settings.state / "rollout.d").glob("*.json")
        report = json.loads(own.read_bytes())
        assert (report["process"], report["stopped"]) == (os.getpid(), False)

    run(settings, nothing)
    (own,) = (settings.state / "rollout.d").glob("*.json")
    left = json.loads(own.read_bytes())
    assert left["stopped"]
    dead = own.with_name(f"{os.getpid()}-1.json")  # an earlier process of this number
    dead.write_text(json.dumps(left | {"started": 1, "stopped": False}))
    run(settings, nothing)
    assert not dead.exists()


def test_the_verify_stage_ignores_rolled_out_models(make_settings: MakeSettings) -> None:
    settings = make_settings(accept_draft="true")
    gone = Model(folder="0123456789ab-01234567", version="0123456789ab", digest="0" * 64)
    change_rollout(settings.state, lambda rollout: rollout.changed(stable=gone))

    async def main() -> None:
        worker = full_worker(settings)
        worker.start()
        await worker.loaded()
        assert worker.model is not None
        await worker.stop()

    asyncio.run(main())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_unwritable_state_folder_affects_no_request(make_settings: MakeSettings) -> None:
    settings = make_settings()
    settings.state.mkdir()
    settings.state.chmod(0o500)

    async def main() -> None:
        worker = full_worker(settings)
        worker.start()
        await worker.loaded()
        await settle(worker, lambda: metric(worker, FAULTS) > 0)
        assert (await worker.predict(Payload("images", (PICTURES[0],)), "one"))["label"]
        await worker.stop()

    try:
        asyncio.run(main())
    finally:
        settings.state.chmod(0o700)


@pytest.mark.process
def test_file_in_place_of_the_state_folder_affects_no_request_and_is_reported(
    make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(monitoring="false")
    settings.state.write_text("a file where a folder should be")

    async def main() -> None:
        worker = full_worker(settings)
        worker.start()
        await worker.loaded()
        await settle(worker, lambda: metric(worker, FAULTS) > 0)
        assert (await worker.predict(Payload("images", (PICTURES[0],)), "one"))["label"]
        before = metric(worker, FAULTS)
        await settle(worker, lambda: metric(worker, FAULTS) > before)  # for as long as it lasts
        await worker.stop()

    asyncio.run(main())
    assert [
        record.message
        for record in caplog.records
        if "cannot follow the rollout" in record.message
        and str(settings.state / "roll") in record.message
    ]


@pytest.mark.usefixtures("unrehearsed")
def test_operators_can_run_rollout_commands_over_http(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    json_type = {"content-type": "application/json"}

    async def work(client: Any, worker: ModelWorker) -> None:
        body = {
            "command": "canary",
            "bundle": str(new_bundle),
            "plan": {"steps": [0.5], "hold_s": 100},
        }
        response = await client.post("/rollout", json=body, headers=json_type)
        assert response.status_code == 202
        assert response.json()["candidate"]["mode"] == "canary"
        await settle(worker, lambda: canary_of(worker) is not None)
        conflict = await client.post("/rollout", json=body, headers=json_type)
        assert (conflict.status_code, error_of(conflict)["code"]) == (409, "rollout_refused")
        assert (
            await client.post("/rollout", json={"command": "promote"}, headers=json_type)
        ).status_code == 202
        await settle(
            worker,
            lambda: (
                worker.model is not None and worker.model.version == load_bundle(new_bundle).version
            ),
        )

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_rollout_command_during_another_one_is_refused_without_blocking_requests(
    new_bundle: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings()
    release = threading.Event()
    monkeypatch.setattr(commands, "rehearse", lambda settings: release.wait(20))
    json_type = {"content-type": "application/json"}

    async def work(client: Any, worker: ModelWorker) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        orders = [{"command": "deploy", "bundle": str(new_bundle)}, *[{"command": "reset"}] * 5]
        asked = [
            asyncio.create_task(client.post("/rollout", json=order, headers=json_type))
            for order in orders
        ]
        done, _ = await asyncio.wait(asked[1:], timeout=5)
        try:
            assert [error_of(task.result())["code"] for task in done] == ["rollout_refused"] * 5
            async with asyncio.timeout(5):
                for path in ("/rollout", "/metrics", "/status"):
                    assert (await client.get(path)).status_code == 200
                await reconciler_of(worker).reconcile()
        finally:
            release.set()
        assert (await asked[0]).status_code == 202
        assert (
            await client.post("/rollout", json={"command": "rollback"}, headers=json_type)
        ).status_code in (202, 409)  # it is its turn

    run(settings, work)


@pytest.mark.process
def test_a_command_is_refused_while_another_one_runs_in_the_same_process(
    make_settings: MakeSettings,
) -> None:
    settings = make_settings()
    with (
        ThreadPoolExecutor(1) as thread,
        command_lock(settings.state),
        pytest.raises(LockedError, match="a rollout command is already running"),
    ):
        thread.submit(commands.reset, settings).result(5)
    commands.reset(settings)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "command"),
        ([], "command"),
        ({"command": "dance"}, "command"),
        ({"command": "deploy"}, "bundle"),
        ({"command": "deploy", "bundle": "x", "bundel": "y"}, "bundel"),
        ({"command": "deploy", "bundle": "a\0b"}, "bundle"),
        ({"command": "canary", "bundle": "x", "certificate": "a\0b"}, "certificate"),
        ({"command": "shadow", "bundle": "x", "engine": "a\0b"}, "engine"),
        ({"command": "canary", "bundle": "x", "plan": {"steps": [2.0]}}, "plan.steps.0"),
        ({"command": "promote", "bundle": "x"}, "bundle"),
        ({"command": "deploy", "bundle": "x", "plan": {"steps": [0.1] * 300}}, None),
    ],
)
def test_invalid_rollout_command_is_refused_with_its_field(
    make_settings: MakeSettings, body: Any, field: str | None
) -> None:
    async def work(client: Any, worker: ModelWorker) -> None:
        response = await client.post(
            "/rollout", json=body, headers={"content-type": "application/json"}
        )
        error = error_of(response)
        assert (response.status_code, error["code"], error["field"]) == (
            422,
            "rollout_invalid",
            field,
        )

    run(make_settings(), work)


def test_rollout_command_must_be_json_so_that_pages_of_other_sites_cannot_send_it(
    make_settings: MakeSettings,
) -> None:
    async def work(client: Any, worker: ModelWorker) -> None:
        response = await client.post(
            "/rollout", content=b'{"command": "reset"}', headers={"content-type": "text/plain"}
        )
        assert error_of(response)["code"] == "unsupported_media_type"
        assert '"command"' in error_of(response)["message"]

    run(make_settings(), work)


def test_settings_of_a_rolled_out_model_point_to_its_copy(
    make_settings: MakeSettings, certified: Path
) -> None:
    settings = make_settings()
    model = commands.propose(settings, "deploy", settings.bundle).stable
    copied = settings_of(settings, model)
    assert copied.bundle.is_relative_to(settings.state)
    assert load_bundle(copied.bundle).digest == load_bundle(settings.bundle).digest
    assert settings_of(settings, None) == settings
