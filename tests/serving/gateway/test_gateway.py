"""Several models at one address, in real processes."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tritonclient import http as triton

from slipway.artifacts.bundle import load_bundle
from tests import plain_http
from tests.serving.bundles import picture, row_classifier, table_row
from tests.serving.gateway.started import running_gateway, write_models
from tests.serving.rolling import scaled_classifier, write_candidate
from tests.serving.server import Server, until

pytestmark = pytest.mark.process


@pytest.fixture(name="gateway", scope="module")
def _gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a gateway with two models that predict and one without a bundle."""
    folder = tmp_path_factory.mktemp("gateway")
    write_models(folder, images=None, rows=row_classifier())
    (folder / "missing").mkdir()
    models = folder / "models.toml"
    text = models.read_text().replace('folder = "images"\n', 'folder = "images"\nniceness = 1\n')
    models.write_text(text + '[models.missing]\nfolder = "missing"\n')
    with running_gateway(folder) as server:
        server.wait("/models/images/readyz")
        server.wait("/models/rows/readyz")
        below = psutil.Process(server.process.pid).children(recursive=True)
        yield server
    assert not psutil.wait_procs(below, 10)[1]


def predicts(gateway: Server) -> int:
    return plain_http.post(
        f"{gateway.url}/models/rows/predict", json={"rows": [table_row(0)]}
    ).status_code


def version_of(base: str) -> str:
    """Return the version of the model that the page of the service `base` names."""
    return str(plain_http.get(f"{base}/status").json()["model"]["version"])


def worker_of(gateway: Server, name: str) -> psutil.Process:
    """Return the process that serves a model."""
    for service in psutil.Process(gateway.process.pid).children():
        if service.cwd().endswith(f"/{name}"):
            return service.children()[0]
    raise AssertionError(f"no service of {name}")


def test_gateway_serves_each_model_below_its_name(gateway: Server) -> None:
    image = plain_http.post(
        f"{gateway.url}/models/images/predict",
        content=picture(),
        headers={"content-type": "image/png"},
    )
    assert (image.status_code, image.json()["label"]) == (200, "grey")
    assert predicts(gateway) == 200
    page = plain_http.get(f"{gateway.url}/models/images/").text
    style = page.partition('rel="stylesheet" href="')[2].partition('"')[0]
    assert plain_http.get(f"{gateway.url}/models/images/{style}").status_code == 200


def test_processes_of_a_model_run_with_its_niceness_added_to_the_gateways(
    gateway: Server,
) -> None:
    own = psutil.Process(gateway.process.pid).nice()
    found = {name: worker_of(gateway, name).nice() for name in ("images", "rows")}
    assert found == {"images": min(own + 1, 19), "rows": own}


def test_a_model_without_a_bundle_is_not_ready_and_its_log_says_why(gateway: Server) -> None:
    answer = plain_http.get(f"{gateway.url}/models/missing/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert "[missing] error: there is no model in" in gateway.log.read_text()


def test_a_client_of_the_open_inference_protocol_finds_each_model(gateway: Server) -> None:
    with triton.InferenceServerClient(gateway.url.removeprefix("http://")) as client:
        assert client.is_server_ready()
        assert client.is_model_ready("images")
        assert client.get_model_metadata("rows")["name"] == "rows"
        states = {one["name"]: one["state"] for one in client.get_model_repository_index()}
    assert states == {"images": "READY", "rows": "READY", "missing": "UNAVAILABLE"}


def test_metrics_of_all_models_have_the_label_of_their_model(gateway: Server) -> None:
    predicts(gateway)
    text = plain_http.get(f"{gateway.url}/metrics").text
    assert 'slipway_requests_total{code="200",model="rows",route="/predict"}' in text
    assert 'slipway_model_info{backend="onnxruntime",model="images"' in text
    assert 'slipway_model_up{model="missing"} 0.0' in text


def test_one_model_is_rolled_out_while_the_other_serves_its_own_version(gateway: Server) -> None:
    """Canary, promotion and return of one model, all through the gateway's routes."""
    images, rows = (f"{gateway.url}/models/{name}" for name in ("images", "rows"))
    old, others = version_of(images), version_of(rows)
    bundle = write_candidate(gateway.log.parent / "new", scaled_classifier(2))
    new = load_bundle(bundle).version

    def ask(base: str) -> str:
        sent = {"content": picture(), "headers": {"content-type": "image/png"}}
        answer = plain_http.post(
            f"{base}/predict", **(sent if base == images else {"json": {"rows": [table_row(0)]}})
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["model_version"])

    def order(command: str, **more: object) -> dict[str, Any]:
        answer = plain_http.post(f"{images}/rollout", json={"command": command, **more}, timeout=60)
        assert answer.status_code == 202, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def both_answer(version: str) -> bool:
        assert ask(rows) == others
        return ask(images) == version

    order("canary", bundle=str(bundle), plan={"steps": [0.5, 1.0], "hold_s": 3600.0})
    until(lambda: both_answer(new))
    until(lambda: both_answer(old))  # the canary answers a share only
    states = [plain_http.get(f"{base}/rollout").json()["candidate"] for base in (images, rows)]
    assert (states[0]["version"], states[1]) == (new, None)
    order("promote")
    until(lambda: version_of(images) == new)
    text = plain_http.get(f"{gateway.url}/metrics").text
    assert 'slipway_swaps_total{model="images",outcome="promoted"} 1.0' in text
    assert 'slipway_swaps_total{model="rows",outcome="promoted"} 1.0' not in text
    order("rollback", version=new)
    until(lambda: version_of(images) == old)
    assert (ask(images), ask(rows)) == (old, others)


def test_hanging_model_does_not_affect_other_models(gateway: Server) -> None:
    worker = worker_of(gateway, "images")
    worker.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(8) as threads:
            hanging = [
                threads.submit(plain_http.get, f"{gateway.url}/models/images/model", timeout=20)
                for _ in range(8)
            ]
            started = time.monotonic()
            assert [predicts(gateway) for _ in range(20)] == [200] * 20
            assert time.monotonic() - started < 5  # before the first of them is given up
            assert {one.result().status_code for one in hanging} == {504}
    finally:
        worker.send_signal(signal.SIGCONT)


def test_gateway_restarts_a_model_whose_server_was_killed(gateway: Server) -> None:
    server = worker_of(gateway, "images").parent()
    assert server
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: plain_http.get(f"{gateway.url}/models/images/readyz").status_code == 503)
    assert predicts(gateway) == 200
    gateway.wait("/models/images/readyz")
    restarts = {
        one["name"]: one["restarts"]
        for one in plain_http.get(f"{gateway.url}/models").json()["models"]
    }
    assert (restarts["images"], restarts["rows"]) == (1, 0)


@pytest.mark.nightly(seconds=30)
def test_gateway_restarts_a_model_above_its_memory_limit_while_others_keep_serving(
    tmp_path: Path,
) -> None:
    write_models(tmp_path, rows=row_classifier(), images=None)
    with (tmp_path / "models.toml").open("a") as file:
        file.write("max_memory_mib = 64\n")  # of the last one; no service fits
    with running_gateway(tmp_path) as server:
        server.wait("/models/rows/readyz", seconds=60)
        line = 'slipway_model_restarts{model="images"} 1.0'
        until(lambda: line in plain_http.get(f"{server.url}/metrics").text, 60)
        assert predicts(server) == 200
        assert "above max_memory_mib = 64" in server.log.read_text()
