"""Responses reveal no paths of the server's file system; the log has full paths."""

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipway.serving.engine_rebuild.extension import RebuildState
from slipway.serving.rollout.history import change_rollout
from slipway.serving.settings import ROOT, redact_paths
from slipway.serving.worker import ModelWorker
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, read_all_settings, rebuild_of, run, set_status_part

ELSEWHERE = "/srv/our models/2026"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{ROOT}/artifacts/bundle is no bundle", "artifacts/bundle is no bundle"),
        (f"nothing is in {ROOT}.", "nothing is in the service's folder."),
        (f"{ROOT}2/bundle", "…/bundle"),
        (f"{ELSEWHERE}/engine holds no engine", "…/engine holds no engine"),
        (
            f"{ELSEWHERE}/engine/engine_manifest.json is missing",
            "…/engine/engine_manifest.json is missing",
        ),
        (
            "[Errno 2] No such file or directory: '/opt/data/x.db'",
            "[Errno 2] No such file or directory: '…/x.db'",
        ),
        ("dlopen(/usr/lib/libnvinfer.so.10): not found", "dlopen(…/libnvinfer.so.10): not found"),
        ("see (/var/log/service/), and path=/a/b", "see (…/), and path=…/b"),
        ("ask /predict, or /v2/health/ready", "ask /predict, or /v2/health/ready"),
        ("onnxruntime/cpu/fp32 agrees", "onnxruntime/cpu/fp32 agrees"),
        ("see https://example.com/a/b/c", "see https://example.com/a/b/c"),
    ],
)
def test_redact_paths_removes_folders_and_keeps_file_names(text: str, expected: str) -> None:
    settings = read_all_settings({"SLIPWAY_ENGINE": f"{ELSEWHERE}/engine"})
    assert redact_paths(text, settings) == expected


def test_redact_paths_covers_all_texts_of_json_and_keeps_keys_and_numbers() -> None:
    content = {"/a/b/c": ["/a/b/c", 1.5, None, {"x": "/a/b/c"}]}
    assert redact_paths(content, read_all_settings({})) == {
        "/a/b/c": ["…/c", 1.5, None, {"x": "…/c"}]
    }


def test_model_info_gives_reasons_without_paths_and_the_log_with_full_paths(
    make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(engine=f"{ELSEWHERE}/engine")

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        rebuild_of(worker).state = RebuildState(
            "swapped", f"the engine in {settings.rebuilt_engine} is served"
        )
        answer = await client.get("/model")
        reasons = answer.json()["execution"]["passed_over"]
        assert reasons[0].startswith("tensorrt/any: ")
        assert (
            answer.json()["rebuild"]["reason"] == "the engine in artifacts/rebuilt_engine is served"
        )
        assert str(ROOT) not in answer.text
        assert ELSEWHERE not in answer.text

    with caplog.at_level(logging.INFO, "bentoml.slipway"):
        run(settings, work)
    assert (
        f"passed over tensorrt/any: {ELSEWHERE}/engine/engine_manifest.json is missing"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/readyz"), ("POST", "/predict"), ("GET", "/model"), ("GET", "/status")],
)
def test_the_reason_for_not_being_ready_contains_no_paths(
    certified: Path,
    make_settings: MakeSettings,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
) -> None:
    (certified / "bundle" / "bundle.json").unlink()
    settings = make_settings()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        answer = await client.request(method, path, content=b"x")
        reason = (
            answer.json()["model"]["reason"] if path == "/status" else error_of(answer)["message"]
        )
        assert reason.startswith(
            f"{(settings.bundle / 'bundle.json').relative_to(ROOT)} is missing"
        )
        assert str(ROOT) not in answer.text

    run(settings, work)
    assert f"not ready: {settings.bundle}/bundle.json is missing" in caplog.text


def test_status_contains_no_paths_but_the_operators_rollout_does(
    make_settings: MakeSettings,
) -> None:
    settings = make_settings()
    reason = f"{ELSEWHERE}/bundle cannot be read, nor {settings.state}/rollout.d"
    change_rollout(settings.state, lambda rollout: rollout.with_event("refused", "0" * 12, reason))

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        set_status_part(worker, "monitoring", "drift", lambda: drift)
        path = f"{settings.state}/proposals/now.md"
        drift: dict[str, Any] = {
            "faults": {"merging": f"{settings.state}/x.db is full"},
            "proposal": {"path": path},
        }
        answer = await client.get("/status")
        status = answer.json()
        state = settings.state.relative_to(ROOT)
        assert status["rollout"]["events"][-1]["reason"].endswith(
            f"bundle cannot be read, nor {state}/rollout.d"
        )
        assert status["drift"] == {
            "faults": {"merging": f"{state}/x.db is full"},
            "proposal": {"path": f"{state}/proposals/now.md"},
        }
        assert str(ROOT) not in answer.text
        assert ELSEWHERE not in answer.text.replace("\\/", "/")
        assert (await client.get("/rollout")).json()["events"][-1]["reason"] == reason

    run(settings, work)
