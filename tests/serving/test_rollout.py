"""Another model, under load: the state, its files and one worker that follows it, in this process; see test_rollout_processes."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.inference import Inference
from serving.payload import Payload
from serving.rollout import commands
from serving.rollout.__main__ import main
from serving.rollout.canary import is_chosen
from serving.rollout.comparing import explained_disagreement, require_successor
from serving.rollout.rehearsal import rehearse
from serving.rollout.state import Allowed, Model, Plan, RolloutError, change_rollout, read_rollout
from serving.rollout.store import settings_of
from serving.settings import Settings
from slipway.bundle import Metric, OutputContract, describe_model, load_bundle, write_manifest
from slipway.columns import ColumnContract
from slipway.errors import SlipwayError
from tests.serving.bundles import COLUMNS, LABELS, certify, column, row_classifier, table_row, with_canary, write_bundle
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, metric
from tests.serving.rolling import (
    PICTURES,
    Callers,
    failing_classifier,
    following,
    scaled_classifier,
    scaled_probabilities,
    settle,
    write_candidate,
)

Work = Callable[[Any, Inference], Coroutine[Any, Any, None]]
QUICK = Plan(steps=(0.2, 1.0), hold_s=0.0, hold_requests=20)


@pytest.fixture
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of its own for each candidate: it takes seconds, and has tests of its own."""
    monkeypatch.setattr(commands, "rehearse", lambda settings: None)


def run(settings: Settings, work: Work, seconds: float = 60) -> None:
    async def main() -> None:
        async with following(settings) as (client, inference):
            await work(client, inference)

    asyncio.run(asyncio.wait_for(main(), seconds))


async def propose(inference: Inference, *arguments: Any, **options: Any) -> None:
    await asyncio.to_thread(commands.propose, inference.settings, *arguments, **options)


async def serves(inference: Inference, version: str) -> None:
    """Wait until it is the stable model, and nothing is on its way."""
    await settle(inference, lambda: inference.model is not None and inference.model.version == version)
    await settle(inference, lambda: read_rollout(inference.settings.state).candidate is None)


def last_event(inference: Inference) -> tuple[str, str]:
    event = read_rollout(inference.settings.state).events[-1]
    return event.what, event.reason


@pytest.mark.usefixtures("unrehearsed")
def test_a_deployed_model_is_served_and_stays_after_a_restart_whatever_becomes_of_its_files(
    certified: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    bundle = write_candidate(certified / "new", scaled_classifier(2))
    version = load_bundle(bundle).version

    async def deploy(client: Any, inference: Inference) -> None:
        await propose(inference, "deploy", bundle)
        await serves(inference, version)
        answer = (await client.post("/predict", content=PICTURES[3])).json()
        assert answer["model_version"] == version
        assert np.allclose(list(answer["probabilities"].values()), scaled_probabilities(2)[3], atol=1e-5)
        assert metric(inference, 'slipway_swaps_total{outcome="swapped"}') == 1

    async def restarted(client: Any, inference: Inference) -> None:
        assert (await client.get("/readyz")).json()["model_version"] == version
        card = (await client.get("/model")).json()
        assert card["rolled_out"] == {"stable": version, "wins_over": str(settings.bundle), "candidate": None}

    run(settings, deploy)
    (bundle / "model_fp32.onnx").write_bytes(b"a repro is at work here")
    (settings.bundle / "bundle.json").unlink()
    run(settings, restarted)


@pytest.mark.usefixtures("unrehearsed")
def test_rollback_returns_to_the_model_before_and_reset_to_the_configured_bundle(certified: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    first = load_bundle(settings.bundle).version
    bundles = [write_candidate(certified / name, scaled_classifier(factor)) for name, factor in (("b", 2), ("c", 3), ("d", 4))]
    versions = [load_bundle(bundle).version for bundle in bundles]

    async def work(client: Any, inference: Inference) -> None:
        for bundle, version in zip(bundles, versions, strict=True):
            await propose(inference, "deploy", bundle)
            await serves(inference, version)
        await settle(
            inference, lambda: {path.name[:12] for path in (settings.state / "models").iterdir()} == set(versions)
        )  # the last three
        for version in (versions[1], versions[0]):
            await asyncio.to_thread(commands.rollback, settings)
            await serves(inference, version)
        with pytest.raises(RolloutError, match="nothing was served before"):
            commands.rollback(settings)
        await asyncio.to_thread(commands.reset, settings)
        await serves(inference, first)
        assert (await client.get("/rollout")).json()["stable"] == "SLIPWAY_BUNDLE"

        await settle(inference, lambda: not list((settings.state / "models").iterdir()))

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_the_way_back_is_a_copy_of_what_was_served_not_of_what_a_repro_made_of_it(certified: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    first = load_bundle(settings.bundle).version
    bundle = write_candidate(certified / "new", scaled_classifier(2))

    async def work(client: Any, inference: Inference) -> None:
        await propose(inference, "deploy", bundle)
        await settle(inference, lambda: inference.model is not None and inference.model.version != first)
        certify(settings.certificate, write_bundle(settings.bundle, scaled_classifier(5)))
        await asyncio.to_thread(commands.rollback, settings)
        await settle(inference, lambda: inference.model is not None and inference.model.version == first)

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_swaps_under_load_lose_no_request_and_each_answer_is_of_the_model_it_names(certified: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    bundles = {2: write_candidate(certified / "b", scaled_classifier(2)), 3: write_candidate(certified / "c", scaled_classifier(3))}
    versions = {factor: load_bundle(bundle).version for factor, bundle in bundles.items()}
    expected = {version: scaled_probabilities(factor) for factor, version in versions.items()}
    expected[load_bundle(settings.bundle).version] = scaled_probabilities(1)
    num_swaps = 6

    async def work(client: Any, inference: Inference) -> None:
        callers = Callers(client, expected)
        for number in range(num_swaps):
            factor = 2 + number % 2
            await propose(inference, "deploy", bundles[factor])
            await serves(inference, versions[factor])
        await callers.end()
        assert (set(callers.statuses), callers.wrong) == ({200}, 0)
        assert set(callers.versions) == set(expected)
        assert metric(inference, 'slipway_swaps_total{outcome="swapped"}') == num_swaps
        assert metric(inference, 'slipway_predictions_total{slot="stable"}') == len(callers.statuses)
        assert inference.exposition().count(b"slipway_model_info{") == 1  # six swaps, one series

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_a_shadow_answers_copies_and_agreement_is_counted(certified: Path, make_settings: MakeSettings) -> None:
    """With its weights reversed it answers otherwise nearly always; doubled, never."""
    settings = make_settings(shadow_share=1.0)

    async def work(client: Any, inference: Inference) -> None:
        for factor, outcome in ((2, "agrees"), (-1, "differs")):
            await propose(inference, "shadow", write_candidate(certified / f"shadow{factor}", scaled_classifier(factor)))
            await settle(inference, lambda: inference.rollout.is_shadowing)
            for payload in PICTURES:
                assert (await client.post("/predict", content=payload)).json()["model_version"] == load_bundle(settings.bundle).version
            name = f'slipway_shadow_total{{outcome="{outcome}"}}'
            await settle(inference, lambda name=name: metric(inference, name) == len(PICTURES))  # type: ignore[misc]  # a default binds it
            status = (await client.get("/rollout")).json()["candidate"]
            assert (status["mode"], status["share"]) == ("shadow", 0)
            await asyncio.to_thread(commands.rollback, settings)
            await settle(inference, lambda: not inference.rollout.is_shadowing)
        assert metric(inference, 'slipway_predictions_total{slot="shadow"}') == 2 * len(PICTURES)
        assert metric(inference, 'slipway_predictions_total{slot="stable"}') == 2 * len(PICTURES)
        assert metric(inference, 'slipway_predictions_total{slot="candidate"}') == 0

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_a_shadow_of_a_table_encodes_rows_its_own_way(certified_table: Path, make_settings: MakeSettings) -> None:
    """Its columns are standardised otherwise, as those of a model that saw other rows are."""
    settings = make_settings(shadow_share=1.0)
    columns = COLUMNS.model_copy(update={"columns": [one.model_copy(update={"mean": one.mean + 1}) for one in COLUMNS.columns]})
    bundle = write_candidate(certified_table / "new", row_classifier(), input=columns)

    async def work(client: Any, inference: Inference) -> None:
        await propose(inference, "shadow", bundle)
        await settle(inference, lambda: inference.rollout.is_shadowing)
        body = json.dumps({"rows": [table_row(number) for number in range(3)]})
        response = await client.post("/predict", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 200
        names = [f'slipway_shadow_total{{outcome="{outcome}"}}' for outcome in ("agrees", "differs")]
        await settle(inference, lambda: sum(metric(inference, name) for name in names) == 1)

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_a_busy_shadow_drops_copies_and_costs_no_request(
    certified: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(shadow_share=1.0)
    release = asyncio.Event()
    monkeypatch.setattr("serving.rollout.shadowing.MAX_WAITING", 2)

    async def work(client: Any, inference: Inference) -> None:
        await propose(inference, "shadow", write_candidate(certified / "new", scaled_classifier(2)))
        await settle(inference, lambda: inference.rollout.is_shadowing)
        shadow = inference._observers[-1]
        loop = asyncio.get_running_loop()
        answer = shadow._run  # type: ignore[attr-defined]  # of Shadow

        def hang(inputs: Any) -> Any:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
            return answer(inputs)

        shadow._run = hang  # type: ignore[attr-defined]
        for number in range(10):
            assert (await client.post("/predict", content=PICTURES[number % 8])).status_code == 200
        assert metric(inference, 'slipway_shadow_total{outcome="dropped"}') == 7  # one is being answered, two wait
        release.set()
        await settle(inference, lambda: metric(inference, 'slipway_shadow_total{outcome="agrees"}') == 3)

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_a_canary_goes_up_step_by_step_and_becomes_the_stable_model(certified: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    bundle = write_candidate(certified / "new", scaled_classifier(2))
    versions = {load_bundle(settings.bundle).version: scaled_probabilities(1), load_bundle(bundle).version: scaled_probabilities(2)}
    shares = []

    async def work(client: Any, inference: Inference) -> None:
        callers = Callers(client, versions)
        await propose(inference, "canary", bundle, plan=QUICK)
        while last_event(inference)[0] in ("began", "step") if read_rollout(settings.state).events else True:
            shares.append(metric(inference, "slipway_candidate_share"))
            await asyncio.sleep(0.02)
        await settle(inference, lambda: inference.model is not None and inference.model.version == load_bundle(bundle).version)
        await callers.end()
        assert last_event(inference)[0] == "promoted"
        assert (set(callers.statuses), callers.wrong) == ({200}, 0)
        assert list(dict.fromkeys(shares)) == [0, 0.2, 1.0]
        counted = [metric(inference, f'slipway_predictions_total{{slot="{slot}"}}') for slot in ("stable", "candidate")]
        assert sum(counted) == len(callers.statuses)
        assert counted[1] >= 40
        assert metric(inference, 'slipway_swaps_total{outcome="promoted"}') == 1
        assert metric(inference, "slipway_candidate_share") == 0

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_a_canary_that_answers_nan_goes_back_at_once_and_no_caller_notices(certified: Path, make_settings: MakeSettings) -> None:
    settings = make_settings(max_batch_size=1)
    bundle = write_candidate(certified / "new", failing_classifier(150))
    stable = load_bundle(settings.bundle).version

    async def work(client: Any, inference: Inference) -> None:
        callers = Callers(client, {stable: scaled_probabilities(1), load_bundle(bundle).version: scaled_probabilities(1)})
        await propose(inference, "canary", bundle, plan=Plan(steps=(1.0,)))
        await settle(inference, lambda: last_event(inference)[0] == "rolled_back" if read_rollout(settings.state).events else False)
        await settle(inference, lambda: inference.canary is None)
        await callers.end()
        assert (set(callers.statuses), callers.wrong) == ({200}, 0)
        assert "NaN or an infinity" in last_event(inference)[1]
        assert inference.model is not None
        assert inference.model.version == stable
        assert metric(inference, 'slipway_swaps_total{outcome="rolled_back"}') == 1

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_a_canary_whose_runtime_fails_goes_back_by_the_law_and_no_caller_notices(certified: Path, make_settings: MakeSettings) -> None:
    settings = make_settings(shadow_share=0)
    bundle = write_candidate(certified / "new", scaled_classifier(2))
    expected = {load_bundle(settings.bundle).version: scaled_probabilities(1), load_bundle(bundle).version: scaled_probabilities(2)}

    async def work(client: Any, inference: Inference) -> None:
        callers = Callers(client, expected)
        await propose(inference, "canary", bundle, plan=Plan(steps=(0.5,), hold_s=100))
        await settle(inference, lambda: inference.canary is not None)
        assert inference.canary

        def fail(batch: Any) -> Any:
            raise RuntimeError("planted")

        inference.canary.live.batcher._run = fail
        await settle(inference, lambda: last_event(inference)[0] == "rolled_back")
        await settle(inference, lambda: inference.canary is None)
        await callers.end()
        assert (set(callers.statuses), callers.wrong) == ({200}, 0)
        assert "fail more often than the stable model's" in last_event(inference)[1]

    run(settings, work)


def test_which_requests_a_canary_gets_is_a_pure_function_that_only_grows() -> None:
    ids = [f"request-{number}" for number in range(20_000)]
    chosen = {share: {one for one in ids if is_chosen(one, share, "0123456789ab")} for share in (0.01, 0.25, 1.0)}
    assert chosen[0.01] < chosen[0.25] < chosen[1.0] == set(ids)
    for share in (0.01, 0.25):
        assert abs(len(chosen[share]) / len(ids) - share) < 4 * np.sqrt(share * (1 - share) / len(ids))
    assert not any(is_chosen(one, 0.0, "0123456789ab") for one in ids)
    assert chosen[0.25] != {one for one in ids if is_chosen(one, 0.25, "another")}  # nobody is always the first


# What is refused leaves the model that serves: S9.


def truncate(bundle: Path) -> None:
    model = bundle / "model_fp32.onnx"
    model.write_bytes(model.read_bytes()[:-100])


def flip_a_byte(bundle: Path) -> None:
    model = bundle / "model_fp32.onnx"
    payload = bytearray(model.read_bytes())
    payload[len(payload) // 2] ^= 1
    model.write_bytes(payload)


def foreign_certificate(bundle: Path) -> None:
    certify(bundle.parent / "certificate.json", write_bundle(bundle.parent / "other", scaled_classifier(7)))


def not_onnx(bundle: Path) -> None:
    """Its digests are right, and it is no model: only a process that loads it can tell."""
    (bundle / "model_fp32.onnx").write_bytes(b"no model")
    manifest = load_bundle(bundle).manifest
    described = describe_model(bundle / "model_fp32.onnx", "fp32", ["cpu"])
    write_manifest(bundle, manifest.model_copy(update={"models": {"fp32": described}}))
    certify(bundle.parent / "certificate.json", load_bundle(bundle))


def canary_of_another(bundle: Path) -> None:
    """The canary rows were answered by a model with other weights."""
    certify(bundle.parent / "certificate.json", with_canary(load_bundle(bundle)))


def nan_on_its_canary(bundle: Path) -> None:
    certify(bundle.parent / "certificate.json", with_canary(write_bundle(bundle, failing_classifier(100))))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate, "was altered: its SHA-256"),
        (flip_a_byte, "was altered: its SHA-256"),
        (foreign_certificate, "the certificate is for bundle"),
        (not_onnx, "in the bundle|cannot be|protobuf|load"),
        (canary_of_another, "were not answered as fp32 answers them"),
        (nan_on_its_canary, "NaN or an infinity"),
    ],
)
def test_a_bad_model_is_refused_and_the_old_one_serves(
    certified: Path, make_settings: MakeSettings, spoil: Callable[[Path], None], reason: str
) -> None:
    settings = make_settings(max_batch_size=1)
    stable = load_bundle(settings.bundle).version
    bundle = write_candidate(certified / "new", scaled_classifier(-2))
    spoil(bundle)

    async def work(client: Any, inference: Inference) -> None:
        with pytest.raises(SlipwayError, match=reason):
            await propose(inference, "deploy", bundle)
        await settle(inference, lambda: metric(inference, 'slipway_swaps_total{outcome="refused"}') == 1)
        assert (await client.post("/predict", content=PICTURES[0])).json()["model_version"] == stable
        shown = (await client.get("/rollout")).json()
        assert shown["events"][-1]["what"] == "refused"
        assert shown["candidate"] is None
        assert [worker["serving"] for worker in shown["workers"]] == [stable]
        assert not list((settings.state / "models").glob("*"))

    run(settings, work)


def low_accuracy(value: float) -> dict[str, Any]:
    return {"metrics": {"accuracy": Metric(value=value, low=value, high=value, confidence=0.95, rows=100)}}


def with_labels(*labels: str) -> dict[str, Any]:
    return {"output": OutputContract(kind="probabilities", labels=list(labels))}


@pytest.mark.usefixtures("unrehearsed")
@pytest.mark.parametrize(
    ("changes", "reason", "allowed"),
    [
        (low_accuracy(0.88), "its accuracy is 0.88, the stable model's 0.9: a loss of 0.02", Allowed(metric_loss=0.03)),
        ({"metrics": {}}, "its bundle has no accuracy", Allowed(metric_loss=None)),
        (with_labels("dark", "grey", "red"), "other labels: without 'bright' and with 'red'", Allowed(other_contract=True)),
        (with_labels(*LABELS[::-1]), "another order", Allowed(other_contract=True)),
    ],
)
def test_a_worse_model_or_one_with_another_signature_is_refused_unless_it_is_allowed(
    certified: Path, make_settings: MakeSettings, changes: dict[str, Any], reason: str, allowed: Allowed
) -> None:
    settings = make_settings()
    stable = load_bundle(settings.bundle).version
    bundle = write_candidate(certified / "new", scaled_classifier(2), **changes)

    async def work(client: Any, inference: Inference) -> None:
        await propose(inference, "deploy", bundle)
        await settle(inference, lambda: metric(inference, 'slipway_swaps_total{outcome="refused"}') == 1)
        assert reason in last_event(inference)[1]
        assert (await client.post("/predict", content=PICTURES[0])).json()["model_version"] == stable
        await propose(inference, "deploy", bundle, allowed=allowed)
        await settle(inference, lambda: inference.model is not None and inference.model.version != stable)

    run(settings, work)


def test_columns_may_be_standardised_otherwise_but_what_callers_send_is_still_taken(tmp_path: Path) -> None:
    stable = write_bundle(tmp_path, row_classifier()).manifest
    assert isinstance(stable.input, ColumnContract)

    def with_columns(*columns: Any) -> Any:
        return stable.model_copy(update={"input": COLUMNS.model_copy(update={"columns": list(columns)})})

    same = COLUMNS.columns
    retrained = [one.model_copy(update={"mean": one.mean + 1, "std": one.std * 2, "fill": one.fill}) for one in same]
    require_successor(with_columns(*retrained, column("height", has_missing=True)), stable, Allowed())
    wider = same[2].model_copy(update={"categories": ["red", "green", "blue", "white"]})
    require_successor(with_columns(*same[:2], wider, *same[3:]), stable, Allowed())
    for columns, reason in [
        (same[1:], "it has no column 'age'"),
        ([*same, column("height", required=True)], "it requires a new column 'height'"),
        ([column("age", "boolean"), *same[1:]], "column 'age' is a boolean, expected a number"),
        ([same[0].model_copy(update={"max": 100.0}), *same[1:]], "column 'age' takes 0.0 to 100.0, expected 0.0 to 120.0"),
        ([*same[:2], same[2].model_copy(update={"categories": ["red"]}), *same[3:]], "does not take 2 of the categories, as 'green'"),
        ([same[0], same[1].model_copy(update={"required": True}), *same[2:]], "column 'income' became required"),
    ]:
        with pytest.raises(RolloutError, match=reason):
            require_successor(with_columns(*columns), stable, Allowed())
        require_successor(with_columns(*columns), stable, Allowed(other_contract=True))
    with pytest.raises(RolloutError, match="no running service changes that"):
        require_successor(write_bundle(tmp_path / "images").manifest, stable, Allowed(other_contract=True))


def test_a_regression_is_compared_by_the_growth_of_its_rmse(tmp_path: Path) -> None:
    def with_rmse(value: float) -> Any:
        bundle = write_bundle(tmp_path).manifest
        rmse = {"rmse": Metric(value=value, low=value, high=value, confidence=0.95, rows=100)}
        return bundle.model_copy(update={"task": "image_regression", "metrics": rmse})

    require_successor(with_rmse(2.02), with_rmse(2.0), Allowed())
    with pytest.raises(RolloutError, match=r"its rmse is 2\.1, the stable model's 2: a loss of 0\.05"):
        require_successor(with_rmse(2.1), with_rmse(2.0), Allowed())
    assert explained_disagreement(with_rmse(2.0), with_rmse(2.0)) == 0.1


def test_models_may_differ_where_one_of_them_errs(tmp_path: Path) -> None:
    good, better = (write_bundle(tmp_path, **low_accuracy(value)).manifest for value in (0.9, 0.95))
    assert explained_disagreement(better, good) == pytest.approx(0.15)
    assert explained_disagreement(*[write_bundle(tmp_path, **low_accuracy(0.3)).manifest] * 2) == 0.5


# Commands and the state.


def test_without_a_worker_a_deployed_model_is_checked_here_and_served_at_the_next_start(
    certified: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings()
    bundle = write_candidate(certified / "new", scaled_classifier(2))
    with pytest.raises(RolloutError, match="no worker follows"):
        commands.propose(settings, "canary", bundle)
    rollout = commands.propose(settings, "deploy", bundle)  # with a real rehearsal
    assert rollout.stable
    assert (rollout.candidate, rollout.stable.version) == (None, load_bundle(bundle).version)
    worse = write_candidate(certified / "worse", scaled_classifier(3), **low_accuracy(0.5))
    with pytest.raises(RolloutError, match=r"its accuracy is 0\.5"):
        commands.propose(settings, "deploy", worse)
    assert commands.wait(settings, 0.0) == (read_rollout(settings.state), [])
    assert commands.rollback(settings).stable is not None  # the copy of SLIPWAY_BUNDLE that was made before


def test_a_model_that_ends_the_process_that_loads_it_is_refused_with_the_signal(
    certified: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    (certified / "sitecustomize.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setenv("PYTHONPATH", str(certified))
    with pytest.raises(RolloutError, match="was ended by SIGSEGV while it was loaded"):
        rehearse(make_settings())


@pytest.mark.usefixtures("unrehearsed")
def test_what_is_typed_is_what_is_proposed(
    certified: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    bundle = write_candidate(certified / "new", scaled_classifier(2))
    monkeypatch.setattr("os.nice", lambda by: 0)
    monkeypatch.setattr("serving.rollout.__main__.read_settings", make_settings)
    proposed: list[dict[str, Any]] = []
    propose_it = commands.propose

    def propose(*arguments: Any, **options: Any) -> Any:
        proposed.append(options)
        return propose_it(*arguments, **options)

    monkeypatch.setattr(commands, "propose", propose)
    main(["deploy", str(bundle), "--allow-metric-loss", "any", "--allow-other-contract"])
    assert capsys.readouterr().out == f"{load_bundle(bundle).version} swapped: no worker runs; the next start serves it\n"
    assert proposed[0]["allowed"] == Allowed(metric_loss=None, other_contract=True)
    typed = ["--steps", "2.5,50", "--hold-seconds", "0", "--hold-requests", "7", "--slow-ms", "20", "--allow-disagreement", "0.2"]
    for arguments, reason in [
        (["canary", str(bundle), *typed], "no worker follows"),
        (["promote"], "there is no candidate"),
        (["deploy", str(certified / "nothing")], "is not a bundle"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 1
        assert reason in capsys.readouterr().err
    assert proposed[1]["plan"] == Plan(steps=(0.025, 0.5), hold_s=0.0, hold_requests=7, slow_s=0.02)
    assert proposed[1]["allowed"].disagreement == 0.2
    with pytest.raises(SystemExit):
        main(["canary", str(bundle), "--steps", "0,50"])
    capsys.readouterr()
    main(["status"])
    assert json.loads(capsys.readouterr().out)["stable"] == load_bundle(bundle).version


async def told(client: Any, answers: list[tuple[str, str]], *, wrong: bool) -> int:
    """How many of these requests' truths were joined; they are told again until all of them are written down."""
    truths = [{"request_id": one, "truth": LABELS[LABELS.index(label) - wrong]} for one, label in answers]
    joined: set[str] = set()
    for _ in range(100):
        response = await client.post("/feedback", json={"feedback": truths}, headers={"content-type": "application/json"})
        joined |= {truth["request_id"] for truth, heard in zip(truths, response.json()["feedback"], strict=True) if heard["joined"]}
        if len(joined) == len(truths):
            break
        await asyncio.sleep(0.1)
    return len(joined)


@pytest.mark.usefixtures("unrehearsed")
def test_wrong_answers_by_feedback_bring_a_canary_back(certified: Path, make_settings: MakeSettings) -> None:
    bundle = write_candidate(certified / "new", scaled_classifier(2))
    versions = [load_bundle(path).version for path in (make_settings().bundle, bundle)]

    async def work(client: Any, inference: Inference) -> None:
        await propose(inference, "canary", bundle, plan=Plan(steps=(0.1, 1.0)))
        await settle(inference, lambda: inference.canary is not None and inference.canary.share > 0)
        asked: dict[str, list[tuple[str, str]]] = {version: [] for version in versions}
        while len(asked[versions[1]]) < 20:
            answer = (await client.post("/predict", content=PICTURES[0])).json()
            asked[answer["model_version"]].append((answer["request_id"], answer["label"]))
        assert len(asked[versions[0]]) > 40
        last = (await client.post("/predict", content=PICTURES[0])).json()
        await told(client, [(last["request_id"], last["label"])], wrong=False)  # all that was before is written down, too
        inference.rollout.note_wrong("of a third model")
        assert await told(client, asked[versions[0]][:40], wrong=True) == 40  # only the candidate's own errors bring it back
        await asyncio.sleep(1.5)
        assert inference.canary is not None
        assert await told(client, asked[versions[1]], wrong=True) == 20
        await settle(inference, lambda: last_event(inference)[0] == "rolled_back")
        assert last_event(inference)[1].startswith("by feedback its answers are wrong more often than the stable model's: ")
        assert re.search(r": (1[0-9]|20) of \d+ of its requests, 40 of", last_event(inference)[1])

    run(make_settings(), work)


@pytest.mark.usefixtures("unrehearsed")
def test_one_candidate_at_a_time(certified: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    bundle = write_candidate(certified / "new", scaled_classifier(2))

    async def work(client: Any, inference: Inference) -> None:
        await propose(inference, "shadow", bundle)
        with pytest.raises(RolloutError, match=r"is on its way \(shadow, .*`promote` it or `rollback` first"):
            await propose(inference, "deploy", write_candidate(certified / "other", scaled_classifier(3)))
        with pytest.raises(RolloutError, match="is on its way"):
            commands.reset(settings)
        await settle(inference, lambda: inference.rollout.is_shadowing)
        await asyncio.to_thread(commands.promote, settings)
        await settle(inference, lambda: inference.model is not None and inference.model.version == load_bundle(bundle).version)
        assert last_event(inference)[0] == "swapped"
        with pytest.raises(RolloutError, match="there is no candidate"):
            commands.promote(settings)

    run(settings, work)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "has format version None"),
        ('{"format_version": 9}', "has format version 9"),
        ('{"format_version": 1}', "is not a rollout"),
    ],
)
def test_a_state_that_is_not_understood_is_named_and_costs_no_model(make_settings: MakeSettings, content: str, reason: str) -> None:
    settings = make_settings()

    async def spoilt(client: Any, inference: Inference) -> None:
        (settings.state / "rollout.json").write_text(content)
        await asyncio.sleep(0.6)
        assert (await client.post("/predict", content=PICTURES[0])).status_code == 200
        (settings.state / "rollout.json").unlink()
        change_rollout(settings.state, lambda rollout: rollout.with_event("refused", "x", "to be counted"))
        await settle(inference, lambda: metric(inference, 'slipway_swaps_total{outcome="refused"}') == 1)  # it follows again

    run(settings, spoilt)
    (settings.state / "rollout.json").write_text(content)
    with pytest.raises(RolloutError, match=reason):
        read_rollout(settings.state)


def test_a_service_does_not_start_on_another_model_than_was_rolled_out(make_settings: MakeSettings) -> None:
    """It says why, and goes on as soon as the state is put right."""
    settings = make_settings()
    gone = Model(folder="0123456789ab-01234567", version="0123456789ab", digest="0" * 64)
    change_rollout(settings.state, lambda rollout: rollout.changed(stable=gone))

    async def work(client: Any, inference: Inference) -> None:
        response = await client.get("/readyz")
        assert response.status_code == 503
        assert "python -m serving.rollout reset" in error_of(response)["message"]
        await asyncio.to_thread(commands.reset, settings)
        await settle(inference, lambda: inference.model is not None)
        assert (await client.get("/readyz")).status_code == 200

    run(settings, work)


def test_what_dead_workers_said_is_forgotten(make_settings: MakeSettings) -> None:
    settings = make_settings()

    async def nothing(client: Any, inference: Inference) -> None:
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


def test_verify_is_not_led_astray_by_what_is_rolled_out(make_settings: MakeSettings) -> None:
    settings = make_settings(accept_draft="true")
    gone = Model(folder="0123456789ab-01234567", version="0123456789ab", digest="0" * 64)
    change_rollout(settings.state, lambda rollout: rollout.changed(stable=gone))

    async def main() -> None:
        inference = Inference(settings)
        inference.start()
        await inference.loaded()
        assert inference.model is not None
        await inference.stop()

    asyncio.run(main())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_costs_no_request(make_settings: MakeSettings) -> None:
    settings = make_settings()
    settings.state.mkdir()
    settings.state.chmod(0o500)

    async def main() -> None:
        inference = Inference(settings)
        inference.start()
        await inference.loaded()
        await asyncio.sleep(0.6)
        assert (await inference.predict(Payload("images", (PICTURES[0],)), "one"))["label"]
        await inference.stop()

    try:
        asyncio.run(main())
    finally:
        settings.state.chmod(0o700)


def test_a_state_in_place_of_a_folder_costs_no_request(make_settings: MakeSettings) -> None:
    settings = make_settings()
    settings.state.write_text("a file where a folder should be")

    async def main() -> None:
        inference = Inference(settings)
        inference.start()
        await inference.loaded()
        await asyncio.sleep(0.6)
        assert (await inference.predict(Payload("images", (PICTURES[0],)), "one"))["label"]
        await inference.stop()

    asyncio.run(main())


# POST /rollout.


@pytest.mark.usefixtures("unrehearsed")
def test_operators_can_ask_over_http(certified: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    bundle = write_candidate(certified / "new", scaled_classifier(2))
    json_type = {"content-type": "application/json"}

    async def work(client: Any, inference: Inference) -> None:
        body = {"command": "canary", "bundle": str(bundle), "plan": {"steps": [0.5], "hold_s": 100}}
        response = await client.post("/rollout", json=body, headers=json_type)
        assert response.status_code == 202
        assert response.json()["candidate"]["mode"] == "canary"
        await settle(inference, lambda: inference.canary is not None)
        conflict = await client.post("/rollout", json=body, headers=json_type)
        assert (conflict.status_code, error_of(conflict)["code"]) == (409, "rollout_refused")
        assert (await client.post("/rollout", json={"command": "promote"}, headers=json_type)).status_code == 202
        await settle(inference, lambda: inference.model is not None and inference.model.version == load_bundle(bundle).version)

    run(settings, work)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "command"),
        ([], "command"),
        ({"command": "dance"}, "command"),
        ({"command": "deploy"}, "bundle"),
        ({"command": "deploy", "bundle": "x", "bundel": "y"}, "bundel"),
        ({"command": "canary", "bundle": "x", "plan": {"steps": [2.0]}}, "plan.steps.0"),
        ({"command": "promote", "bundle": "x"}, "bundle"),
        ({"command": "deploy", "bundle": "x", "plan": {"steps": [0.1] * 300}}, None),
    ],
)
def test_a_wrong_order_is_named(make_settings: MakeSettings, body: Any, field: str | None) -> None:
    async def work(client: Any, inference: Inference) -> None:
        response = await client.post("/rollout", json=body, headers={"content-type": "application/json"})
        error = error_of(response)
        assert (response.status_code, error["code"], error["field"]) == (422, "rollout_invalid", field)

    run(make_settings(), work)


def test_an_order_has_to_be_json_so_that_no_page_elsewhere_can_send_it(make_settings: MakeSettings) -> None:
    async def work(client: Any, inference: Inference) -> None:
        response = await client.post("/rollout", content=b'{"command": "reset"}', headers={"content-type": "text/plain"})
        assert error_of(response)["code"] == "unsupported_media_type"

    run(make_settings(), work)


def test_settings_of_a_copy_name_the_copy(make_settings: MakeSettings, certified: Path) -> None:
    settings = make_settings()
    model = commands.propose(settings, "deploy", settings.bundle).stable
    copied = settings_of(settings, model)
    assert copied.bundle.is_relative_to(settings.state)
    assert load_bundle(copied.bundle).digest == load_bundle(settings.bundle).digest
    assert settings_of(settings, None) == settings
