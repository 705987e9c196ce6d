"""A swap, a shadow and a canary under load in one worker; test_processes has several workers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.serving.rollout import commands
from slipway.serving.rollout.candidate.canary import is_chosen
from slipway.serving.rollout.state import RolloutError, RolloutPlan, read_rollout
from slipway.serving.worker import ModelWorker
from tests.conftest import ROOT
from tests.serving.bundles import COLUMNS, certify, row_classifier, table_row, write_bundle
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import canary_of, is_shadowing, metric, put_in_place_of
from tests.serving.rolling import (
    PICTURES,
    QUICK,
    Callers,
    begin_canary,
    failing_classifier,
    last_event,
    propose,
    run,
    salt_of,
    scaled_classifier,
    scaled_probabilities,
    serves,
    settle,
    write_candidate,
)


@pytest.mark.usefixtures("unrehearsed")
def test_a_deployed_model_survives_a_restart_and_the_loss_of_its_original_files(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    version = load_bundle(new_bundle).version

    async def deploy(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "deploy", new_bundle)
        await serves(worker, version)
        answer = (await client.post("/predict", content=PICTURES[3])).json()
        assert answer["model_version"] == version
        assert np.allclose(
            list(answer["probabilities"].values()), scaled_probabilities(2)[3], atol=1e-5
        )
        assert metric(worker, 'slipway_swaps_total{outcome="swapped"}') == 1

    async def restarted(client: Any, worker: ModelWorker) -> None:
        assert (await client.get("/readyz")).json()["model_version"] == version
        card = (await client.get("/model")).json()
        assert card["rolled_out"] == {
            "stable": version,
            "wins_over": str(settings.bundle.relative_to(ROOT)),
            "candidate": None,
        }

    run(settings, deploy)
    (new_bundle / "model_fp32.onnx").write_bytes(b"a repro is at work here")
    (settings.bundle / "bundle.json").unlink()
    run(settings, restarted)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_rollback_returns_to_the_previous_model_and_reset_to_the_configured_bundle(
    certified: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    first = load_bundle(settings.bundle).version
    bundles = [
        write_candidate(certified / name, scaled_classifier(factor))
        for name, factor in (("b", 2), ("c", 3), ("d", 4))
    ]
    versions = [load_bundle(bundle).version for bundle in bundles]

    async def work(client: Any, worker: ModelWorker) -> None:
        for bundle, version in zip(bundles, versions, strict=True):
            await propose(worker, "deploy", bundle)
            await serves(worker, version)
        await settle(
            worker,
            lambda: (
                {path.name[:12] for path in (settings.state / "models").iterdir()} == set(versions)
            ),
        )  # the last three
        for version in (versions[1], versions[0]):
            await asyncio.to_thread(commands.rollback, settings)
            await serves(worker, version)
        with pytest.raises(RolloutError, match="no earlier model to return to"):
            commands.rollback(settings)
        await asyncio.to_thread(commands.reset, settings)
        await serves(worker, first)
        assert (await client.get("/rollout")).json()["stable"] == "SLIPWAY_BUNDLE"

        await settle(worker, lambda: not list((settings.state / "models").iterdir()))

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_rollback_returns_to_the_served_files_even_if_a_repro_replaced_them(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    first = load_bundle(settings.bundle).version

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "deploy", new_bundle)
        await settle(worker, lambda: worker.model is not None and worker.model.version != first)
        certify(settings.certificate, write_bundle(settings.bundle, scaled_classifier(5)))
        await asyncio.to_thread(commands.rollback, settings)
        await settle(worker, lambda: worker.model is not None and worker.model.version == first)

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_swaps_under_load_lose_no_request_and_each_response_names_its_model(
    certified: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    bundles = {
        2: write_candidate(certified / "b", scaled_classifier(2)),
        3: write_candidate(certified / "c", scaled_classifier(3)),
    }
    versions = {factor: load_bundle(bundle).version for factor, bundle in bundles.items()}
    expected = {version: scaled_probabilities(factor) for factor, version in versions.items()}
    expected[load_bundle(settings.bundle).version] = scaled_probabilities(1)
    num_swaps = 6

    async def work(client: Any, worker: ModelWorker) -> None:
        callers = Callers(client, expected)
        for number in range(num_swaps):
            factor = 2 + number % 2
            await propose(worker, "deploy", bundles[factor])
            await serves(worker, versions[factor])
        await callers.end()
        assert (set(callers.statuses), callers.wrong) == ({200}, 0)
        assert set(callers.versions) == set(expected)
        assert metric(worker, 'slipway_swaps_total{outcome="swapped"}') == num_swaps
        assert metric(worker, 'slipway_predictions_total{slot="stable"}') == len(callers.statuses)
        assert (
            worker.metrics.exposition().count(b"slipway_model_info{") == 1
        )  # six swaps, one series

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_shadow_predicts_copies_of_requests_and_counts_agreement(
    certified: Path, make_settings: MakeSettings
) -> None:
    """With reversed weights its answers nearly always differ; with doubled weights, never."""
    settings = make_settings(shadow_fraction=1.0)

    async def work(client: Any, worker: ModelWorker) -> None:
        for factor, outcome in ((2, "agrees"), (-1, "differs")):
            await propose(
                worker,
                "shadow",
                write_candidate(certified / f"shadow{factor}", scaled_classifier(factor)),
            )
            await settle(worker, lambda: is_shadowing(worker))
            for payload in PICTURES:
                assert (await client.post("/predict", content=payload)).json()[
                    "model_version"
                ] == load_bundle(settings.bundle).version
            name = f'slipway_shadow_total{{outcome="{outcome}"}}'

            def is_compared(name: str = name) -> bool:
                return metric(worker, name) == len(PICTURES)

            await settle(worker, is_compared)
            status = (await client.get("/rollout")).json()["candidate"]
            assert (status["mode"], status["fraction"]) == ("shadow", 0)
            await asyncio.to_thread(commands.rollback, settings)
            await settle(worker, lambda: not is_shadowing(worker))
        assert metric(worker, 'slipway_predictions_total{slot="shadow"}') == 2 * len(PICTURES)
        assert metric(worker, 'slipway_predictions_total{slot="stable"}') == 2 * len(PICTURES)
        assert metric(worker, 'slipway_predictions_total{slot="candidate"}') == 0

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_requests_of_a_shadow_are_drawn_with_the_secret_salt(
    certified: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(shadow_fraction=0.5)
    ids = [f"asked-{number}" for number in range(40)]

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "shadow", write_candidate(certified / "shadow", scaled_classifier(2)))
        await settle(worker, lambda: is_shadowing(worker))
        for one in ids:
            assert (
                await client.post("/predict", content=PICTURES[0], headers={"x-request-id": one})
            ).status_code == 200
            chosen = sum(
                is_chosen(each, 0.5, f"shadow:{salt_of(settings)}")
                for each in ids[: ids.index(one) + 1]
            )
            await settle(
                worker,
                lambda chosen=chosen: (  # type: ignore[misc]  # a default binds it
                    metric(worker, 'slipway_shadow_total{outcome="agrees"}') == chosen
                ),
            )
        assert 0 < chosen < len(ids)

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_a_shadow_encodes_table_rows_with_its_own_contract(
    certified_table: Path, make_settings: MakeSettings
) -> None:
    """Its columns are standardised as by a model that was trained on other rows."""
    settings = make_settings(shadow_fraction=1.0)
    columns = COLUMNS.model_copy(
        update={
            "columns": [one.model_copy(update={"mean": one.mean + 1}) for one in COLUMNS.columns]
        }
    )
    bundle = write_candidate(certified_table / "new", row_classifier(), input=columns)

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "shadow", bundle)
        await settle(worker, lambda: is_shadowing(worker))
        body = json.dumps({"rows": [table_row(number) for number in range(3)]})
        response = await client.post(
            "/predict", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 200
        names = [
            f'slipway_shadow_total{{outcome="{outcome}"}}' for outcome in ("agrees", "differs")
        ]
        await settle(worker, lambda: sum(metric(worker, name) for name in names) == 1)

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_a_busy_shadow_drops_copies_and_delays_no_request(
    certified: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(shadow_fraction=1.0)
    release = asyncio.Event()
    monkeypatch.setattr("slipway.serving.rollout.candidate.shadow.MAX_WAITING", 2)

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "shadow", write_candidate(certified / "new", scaled_classifier(2)))
        await settle(worker, lambda: is_shadowing(worker))
        shadow = worker.observers.all[-1]
        loop = asyncio.get_running_loop()
        answer = shadow._run  # type: ignore[attr-defined]  # of Shadow

        def hang(inputs: Any) -> Any:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            return answer(inputs)

        shadow._run = hang  # type: ignore[attr-defined]
        try:
            for number in range(10):
                assert (
                    await client.post("/predict", content=PICTURES[number % 8])
                ).status_code == 200
                await asyncio.sleep(0)  # observers run in the next turn of the event loop
                if not number:  # the thread, which has the lowest priority, takes it first
                    await settle(worker, shadow._waiting.empty)  # type: ignore[attr-defined]
            assert (
                metric(worker, 'slipway_shadow_total{outcome="dropped"}') == 7
            )  # one is being answered, two wait
        finally:
            release.set()
        await settle(worker, lambda: metric(worker, 'slipway_shadow_total{outcome="agrees"}') == 3)

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_a_canary_advances_step_by_step_and_becomes_the_stable_model(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    versions = {
        load_bundle(settings.bundle).version: scaled_probabilities(1),
        load_bundle(new_bundle).version: scaled_probabilities(2),
    }
    shares = []

    async def work(client: Any, worker: ModelWorker) -> None:
        callers = Callers(client, versions)
        await propose(worker, "canary", new_bundle, plan=QUICK)
        while last_event(worker)[0] in ("proposed", "began", "step"):
            shares.append(metric(worker, "slipway_candidate_fraction"))
            await asyncio.sleep(0.02)
        await settle(
            worker,
            lambda: (
                worker.model is not None and worker.model.version == load_bundle(new_bundle).version
            ),
        )
        assert metric(worker, "slipway_candidate_fraction") == 0  # no sooner and no later
        await callers.end()
        assert last_event(worker)[0] == "promoted"
        assert (set(callers.statuses), callers.wrong) == ({200}, 0)
        assert list(dict.fromkeys(shares)) == [0, 0.2, 1.0]
        counted = [
            metric(worker, f'slipway_predictions_total{{slot="{slot}"}}')
            for slot in ("stable", "candidate")
        ]
        assert sum(counted) == len(callers.statuses)
        assert counted[1] >= 40
        assert metric(worker, 'slipway_swaps_total{outcome="promoted"}') == 1
        assert metric(worker, "slipway_candidate_fraction") == 0

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_canary_that_predicts_nan_is_rolled_back_at_once_unnoticed_by_callers(
    certified: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(max_batch_size=1)
    bundle = write_candidate(certified / "new", failing_classifier(150))
    stable = load_bundle(settings.bundle).version

    async def work(client: Any, worker: ModelWorker) -> None:
        callers = Callers(
            client,
            {stable: scaled_probabilities(1), load_bundle(bundle).version: scaled_probabilities(1)},
        )
        await propose(worker, "canary", bundle, plan=RolloutPlan(steps=(1.0,)))
        await settle(
            worker,
            lambda: (
                last_event(worker)[0] == "rolled_back"
                if read_rollout(settings.state).events
                else False
            ),
        )
        await settle(worker, lambda: canary_of(worker) is None)
        await callers.end()
        assert (set(callers.statuses), callers.wrong) == ({200}, 0)
        assert "NaN or an infinity" in last_event(worker)[1]
        assert worker.model is not None
        assert worker.model.version == stable
        assert metric(worker, 'slipway_swaps_total{outcome="rolled_back"}') == 1

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_canary_whose_runtime_fails_is_rolled_back_unnoticed_by_callers(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(shadow_fraction=0)
    expected = {
        load_bundle(settings.bundle).version: scaled_probabilities(1),
        load_bundle(new_bundle).version: scaled_probabilities(2),
    }

    async def work(client: Any, worker: ModelWorker) -> None:
        callers = Callers(client, expected)
        await begin_canary(worker, new_bundle)
        assert canary_of(worker)

        def fail(batch: Any) -> Any:
            raise RuntimeError("planted")

        put_in_place_of(canary_of(worker).live, fail)
        await settle(worker, lambda: last_event(worker)[0] == "rolled_back")
        await settle(worker, lambda: canary_of(worker) is None)
        await callers.end()
        assert (set(callers.statuses), callers.wrong) == ({200}, 0)
        assert "fail more often than the stable model's" in last_event(worker)[1]

    run(settings, work)


@pytest.mark.process
@pytest.mark.usefixtures("unrehearsed")
def test_the_model_that_predicts_for_a_request_id_also_explains_it(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(shadow_fraction=0)
    stable, candidate = load_bundle(settings.bundle).version, load_bundle(new_bundle).version
    ids = [f"asked-{number}" for number in range(32)]

    async def versions(client: Any, path: str) -> list[str]:
        answers = [
            await client.post(path, content=PICTURES[0], headers={"x-request-id": one})
            for one in ids
        ]
        assert [(answer.status_code, answer.headers["x-request-id"]) for answer in answers] == [
            (200, one) for one in ids
        ]
        return [answer.json()["model_version"] for answer in answers]

    async def work(client: Any, worker: ModelWorker) -> None:
        await begin_canary(worker, new_bundle)
        assert canary_of(worker)
        expected = [candidate if is_chosen(one, 0.5, salt_of(settings)) else stable for one in ids]
        assert await versions(client, "/predict") == expected
        counted = canary_of(worker)._evidence.counts()
        assert await versions(client, "/explain") == expected
        assert canary_of(worker)._evidence.counts() == counted  # an explanation is no evidence

        def fail(batch: Any) -> Any:
            raise RuntimeError("planted")

        put_in_place_of(canary_of(worker).live, fail)
        assert await versions(client, "/explain") == [stable] * len(
            ids
        )  # as with a prediction, no caller notices

    run(settings, work)


def test_a_larger_share_only_adds_requests_to_a_canary() -> None:
    ids = [f"request-{number}" for number in range(20_000)]
    chosen = {
        share: {one for one in ids if is_chosen(one, share, "0123456789ab")}
        for share in (0.01, 0.25, 1.0)
    }
    assert chosen[0.01] < chosen[0.25] < chosen[1.0] == set(ids)
    for share in (0.01, 0.25):
        assert abs(len(chosen[share]) / len(ids) - share) < 4 * np.sqrt(
            share * (1 - share) / len(ids)
        )
    assert not any(is_chosen(one, 0.0, "0123456789ab") for one in ids)
    assert chosen[0.25] != {
        one for one in ids if is_chosen(one, 0.25, "another")
    }  # nobody is always the first
