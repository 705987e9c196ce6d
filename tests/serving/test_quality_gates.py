"""Models below their quality gates: everything that would release one refuses its certificate.

Other uses are allowed.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.certificate import read_certificate, write_certificate
from slipway.artifacts.gates import GateResult
from slipway.serving.load_test.__main__ import tune
from slipway.serving.models.loader import load_model
from slipway.serving.process.packing import bento_labels
from slipway.serving.rollout import commands
from slipway.serving.rollout.history import change_rollout
from slipway.serving.rollout.rehearsal import rehearse
from slipway.serving.rollout.state import read_rollout
from slipway.serving.rollout.store import add_model, settings_of
from slipway.serving.worker import ModelWorker
from slipway.system.errors import CertificateError, GateMissedError
from tests.serving.bundles import certify, gate, write_bundle
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, is_shadowing
from tests.serving.in_process import run as run_service
from tests.serving.rolling import (
    last_event,
    propose,
    run,
    scaled_classifier,
    settle,
    write_candidate,
)

MISSED, UNJUDGED = gate(0.5), gate(None, name="roc_auc")
FAILED = pytest.mark.parametrize("failed", [MISSED, UNJUDGED], ids=["missed", "unjudged"])


def judge(folder: Path, *gates: GateResult) -> Path:
    """Certify the bundle in `folder` with these gate results."""
    certify(folder / "certificate.json", load_bundle(folder / "bundle"), gates=list(gates))
    return folder / "bundle"


@FAILED
def test_service_with_a_missed_gate_is_not_ready_and_gives_the_remedy(
    certified: Path, make_settings: MakeSettings, failed: GateResult
) -> None:
    judge(certified, gate(name="f1_macro"), failed)
    said: list[str] = []

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = await client.get("/readyz")
        said.append(error_of(answer)["message"])
        status = (await client.get("/status")).json()["model"]
        assert (answer.status_code, status["ready"], status["reason"]) == (503, False, said[0])
        for path in ("/model", "/v2/health/ready"):
            assert (await client.get(path)).status_code == 503

    run_service(make_settings(), work)
    version = load_bundle(certified / "bundle").version
    verdict = "missed" if failed is MISSED else "unjudged"
    assert said[0].startswith(f"model {version} did not pass its quality gates ({verdict})")
    assert failed.text in said[0]
    assert "f1_macro" not in said[0]
    assert "change the gate in params.yaml, then run `slipway run`" in said[0]


@pytest.mark.parametrize("gates", [[], [gate()]], ids=["none", "passed"])
def test_a_model_with_passed_gates_or_without_gates_is_served_with_its_baseline(
    certified: Path, make_settings: MakeSettings, gates: list[GateResult]
) -> None:
    judge(certified, *gates)
    model = load_model(make_settings())
    assert model.certificate.gates == ("passed" if gates else "none")
    assert model.info()["baseline"] == {"accuracy": 0.4}


def test_error_lists_the_first_missed_gates_and_counts_the_others(
    certified: Path, make_settings: MakeSettings
) -> None:
    judge(certified, *(gate(0.5, name=f"metric_{number}") for number in range(5)))
    with pytest.raises(GateMissedError, match=r"metric_2 .*; and 2 more") as caught:
        load_model(make_settings())
    assert "metric_3" not in str(caught.value)


def test_only_verify_may_load_a_draft_with_missed_gates(
    certified: Path, make_settings: MakeSettings
) -> None:
    path, bundle = certified / "certificate.json", load_bundle(certified / "bundle")
    certify(path, bundle, status="draft", gates=[MISSED])
    assert load_model(make_settings(accept_draft="true"))
    judge(certified, MISSED)
    with pytest.raises(GateMissedError):
        load_model(make_settings(accept_draft="true"))


def test_certificate_with_a_gate_verdict_that_contradicts_its_results_is_invalid(
    certified: Path,
) -> None:
    path = certified / "certificate.json"
    judge(certified, MISSED)
    write_certificate(path, read_certificate(path).model_copy(update={"gates": "passed"}))
    with pytest.raises(CertificateError, match="gates is 'passed', but the results say 'missed'"):
        read_certificate(path)


@pytest.mark.usefixtures("unrehearsed")
@FAILED
def test_candidate_with_missed_gates_may_only_shadow(
    certified: Path, make_settings: MakeSettings, failed: GateResult
) -> None:
    settings = make_settings(shadow_fraction=1.0)
    write_candidate(certified / "new", scaled_classifier(2))
    bundle = judge(certified / "new", failed)

    async def work(client: Any, worker: ModelWorker) -> None:
        for mode in ("canary", "deploy"):
            with pytest.raises(GateMissedError, match="did not pass its quality gates"):
                await propose(worker, mode, bundle)
            assert last_event(worker)[0] == "refused"
        await propose(worker, "shadow", bundle)
        await settle(worker, lambda: is_shadowing(worker))
        with pytest.raises(GateMissedError):
            await asyncio.to_thread(commands.promote, settings)
        assert is_shadowing(worker)
        assert read_rollout(settings.state).stable is None

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_a_shadow_with_passed_gates_is_promoted(
    new_bundle: Path, make_settings: MakeSettings
) -> None:
    settings = make_settings(shadow_fraction=1.0)
    version = load_bundle(new_bundle).version

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "shadow", new_bundle)
        await settle(worker, lambda: is_shadowing(worker))
        await asyncio.to_thread(commands.promote, settings)
        await settle(worker, lambda: worker.model is not None and worker.model.version == version)

    run(settings, work)


@pytest.mark.usefixtures("unrehearsed")
def test_worker_checks_the_gates_of_a_canary_again(
    certified: Path, make_settings: MakeSettings
) -> None:
    """A copy that was taken for a shadow is named as a canary in the state."""
    settings = make_settings(shadow_fraction=1.0)
    write_candidate(certified / "new", scaled_classifier(2))
    bundle = judge(certified / "new", MISSED)

    async def work(client: Any, worker: ModelWorker) -> None:
        await propose(worker, "shadow", bundle)
        await settle(worker, lambda: is_shadowing(worker))

        def as_canary(rollout: Any) -> Any:
            changes = {"mode": "canary", "id": rollout.revision + 1, "phase": "preparing"}
            return rollout.changed(candidate=rollout.candidate.model_copy(update=changes))

        await asyncio.to_thread(change_rollout, settings.state, as_canary)
        await settle(worker, lambda: last_event(worker)[0] == "refused")
        assert "did not pass its quality gates" in last_event(worker)[1]

    run(settings, work)


def test_store_copies_a_model_with_missed_gates_for_shadowing_only(
    certified: Path, make_settings: MakeSettings
) -> None:
    settings, bundle = make_settings(), judge(certified, MISSED)
    certificate = certified / "certificate.json"
    with pytest.raises(GateMissedError):
        add_model(settings.state, bundle, certificate, None)
    assert not list(settings.state.glob("models/*"))
    model = add_model(settings.state, bundle, certificate, None, is_shadow=True)
    with pytest.raises(GateMissedError):
        add_model(settings.state, bundle, certificate, None)
    with pytest.raises(GateMissedError):  # as the stable model, after a restart
        load_model(settings_of(settings, model))


def test_a_shadow_with_missed_gates_is_rehearsed(
    certified: Path, make_settings: MakeSettings
) -> None:
    judge(certified, MISSED)
    rehearse(make_settings())


@FAILED
def test_bento_build_refuses_a_model_with_missed_gates(tmp_path: Path, failed: GateResult) -> None:
    bundle = write_bundle(tmp_path / "artifacts/bundle")
    certify(tmp_path / "artifacts/certificate.json", bundle)
    assert bento_labels(tmp_path)["model_version"] == bundle.version
    judge(tmp_path / "artifacts", failed)
    with pytest.raises(GateMissedError, match="released or packed"):
        bento_labels(tmp_path)


def test_load_test_refuses_a_model_with_missed_gates(
    certified: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "slipway.serving.load_test.__main__.read_settings", lambda _: make_settings()
    )
    judge(certified, MISSED)
    with pytest.raises(GateMissedError):
        tune(argparse.Namespace(out=certified))
    judge(certified, gate())
    with pytest.raises(AttributeError, match="samples"):  # reaches the requested measurement
        tune(argparse.Namespace(out=certified))
