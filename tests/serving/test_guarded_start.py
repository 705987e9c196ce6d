"""The real process: listening addresses, authentication, admin port and log content."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipway.serving.app import Application
from slipway.serving.auth.keys import add_key
from slipway.serving.metrics.service_metrics import FLUSH_S
from tests import plain_http
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import behind, full_worker
from tests.serving.server import ROOT, environment, free_port, running

PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("guarded")
    certify(root / "certificate.json", write_bundle(root / "bundle"))
    return root


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def refused_start(
    folder: Path, *arguments: str, host: str | None = None, **settings: object
) -> str:
    """Return the one line that `bentoml serve` prints when it refuses to start.

    `host` is BENTOML_HOST, which containers set.
    """
    variables = environment(folder, **settings) | ({"BENTOML_HOST": host} if host else {})
    command = [
        sys.executable,
        "-m",
        "bentoml",
        "serve",
        "slipway.serving.service:Slipway",
        "--port",
        str(free_port()),
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    return done.stderr


@pytest.mark.process
@pytest.mark.parametrize(("host", "arguments"), [("0.0.0.0", ()), (None, ("--host", "::"))])
def test_without_api_keys_the_service_does_not_start_on_a_remote_address(
    folder: Path, host: str | None, arguments: tuple[str, ...]
) -> None:
    message = refused_start(folder, *arguments, host=host)
    assert "can be reached from other machines, and no API keys are configured" in message
    assert "SLIPWAY_DISABLE_AUTH=true" in message


@pytest.mark.process
def test_start_with_two_onnx_runtime_packages_ends_with_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        info = tmp_path / f"{name.replace('-', '_')}-1.24.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.24.0\n"
        (info / "METADATA").write_text(metadata)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    message = refused_start(folder)
    assert "onnxruntime and onnxruntime-gpu are both installed" in message
    assert "install slipway-ml[serve-cpu]" in message


@pytest.mark.process
def test_start_with_an_invalid_key_file_or_taken_admin_port_ends_with_one_line(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("alice\n")
    assert "line 1: expected name:role:sha256" in refused_start(folder, keys=tmp_path / "keys")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        message = refused_start(folder, admin_port=taken.getsockname()[1])
    assert "Address already in use. Choose another with SLIPWAY_ADMIN_PORT" in message
    assert "set SLIPWAY_IDLE_TIMEOUT_S" in refused_start(folder, "--timeout-keep-alive", "9")


@pytest.mark.process
def test_with_api_keys_the_service_listens_remotely_and_admits_key_holders(
    folder: Path, tmp_path: Path
) -> None:
    key = add_key(tmp_path / "keys", "alice", "caller", None)
    with running(folder, keys=tmp_path / "keys", host="0.0.0.0") as server:
        server.wait()
        assert plain_http.get(server.url + "/model").status_code == 401
        assert plain_http.get(server.url + "/model", headers=bearer(key)).status_code == 200
        script = f"""
import bentoml, pathlib
with bentoml.SyncHTTPClient({server.url!r}, token={key!r}) as client:
    print(client.predict(image=pathlib.Path("x.png"))["label"])
"""
        (tmp_path / "x.png").write_bytes(picture())
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        answer = plain_http.post(
            server.url + "/predict", content=picture(), headers=PNG | bearer(key)
        )
        assert done.stdout.split() == [answer.json()["label"]]

        # Another file takes its place while the service runs.
        new = add_key(tmp_path / "new", "alice", "caller", None)
        (tmp_path / "new").rename(tmp_path / "keys")
        deadline = time.monotonic() + 10
        while plain_http.get(server.url + "/model", headers=bearer(new)).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert (
            plain_http.get(server.url + "/model", headers=bearer(key)).json()["error"]["code"]
            == "key_unknown"
        )


@pytest.mark.parametrize(
    ("address", "variables", "is_refused"),
    [
        ("10.0.0.5", {}, True),
        ("2001:db8::1", {}, True),
        ("127.0.0.1", {}, False),
        ("::ffff:127.0.0.1", {}, False),
        ("10.0.0.5", {"disable_auth": True}, False),
        ("10.0.0.5", {"keys": "keys"}, False),
    ],
)
def test_worker_refuses_remote_requests_for_any_way_of_starting_it(
    address: str,
    variables: dict[str, Any],
    is_refused: bool,
    make_settings: MakeSettings,
    tmp_path: Path,
) -> None:
    """BentoML's interface for Python starts it without the check of the command line."""
    if "keys" in variables:
        add_key(tmp_path / "keys", "alice", "caller", None)
        variables = {"keys": tmp_path / "keys"}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": "/livez",
        "raw_path": b"/livez",
        "query_string": b"",
        "headers": [],
        "server": (address, 3000),
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    application = Application(behind, full_worker(make_settings(**variables)))
    asyncio.run(application(scope, receive, send))
    assert (sent[0]["status"] == 403) is is_refused
    if is_refused:
        assert json.loads(sent[1]["body"])["error"]["code"] == "not_allowed"
        assert (b"connection", b"close") in sent[0]["headers"]


@pytest.mark.process
def test_every_worker_serves_the_operators_port(folder: Path) -> None:
    port = free_port()
    with running(folder, workers=2, admin_port=port, request_timeout_s=1) as server:
        server.wait()
        operators = f"http://127.0.0.1:{port}"
        for _ in range(40):
            assert (
                plain_http.post(server.url + "/predict", content=picture(), headers=PNG).status_code
                == 200
            )
        for path, statuses in {
            "/metrics": (404, 200),
            "/docs": (404, 200),
            "/model": (200, 404),
            "/livez": (200, 200),
        }.items():
            assert (
                plain_http.get(server.url + path).status_code,
                plain_http.get(operators + path).status_code,
            ) == statuses
        time.sleep(10 * FLUSH_S)  # so late may be what the other one counted last
        for _ in range(6):  # whichever worker answers, it answers for both
            assert (
                'requests_total{code="200",route="/predict"} 40.0'
                in plain_http.get(operators + "/metrics").text
            )
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"no http\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
        listeners = workers_of(server.process.pid)
        os.kill(listeners[0], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while (
            len(set(workers_of(server.process.pid)) - set(listeners)) == 0
            or plain_http.get(server.url + "/readyz").status_code != 200
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1)
        for _ in range(6):
            assert plain_http.get(operators + "/metrics").status_code == 200
    with pytest.raises(httpx.ConnectError):
        plain_http.get(operators + "/livez")


def workers_of(process: int) -> list[int]:
    return [
        int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


@pytest.mark.process
def test_the_log_contains_no_keys_and_no_request_content(folder: Path, tmp_path: Path) -> None:
    keys = {
        name: add_key(tmp_path / "keys", name, "caller", rate)
        for name, rate in (("alice", None), ("slow", 0.001))
    }
    secret = "topsecret0123456789"
    with running(folder, keys=tmp_path / "keys", max_body_bytes=100_000) as server:
        server.wait()
        with httpx.Client(base_url=server.url) as client:
            for headers in (
                bearer(keys["alice"]),
                {"x-api-key": keys["slow"]},
                bearer(secret),
                {"authorization": f"Basic {secret}"},
                {},
            ):
                for content in (picture(), secret.encode(), secret.encode() * 10_000):
                    client.post(f"/predict?key={secret}", content=content, headers=PNG | headers)
                form = {"image": (secret, secret.encode(), f"image/{secret}")}
                client.post("/predict", files=form, headers=headers)
                client.get(f"/{secret}", headers=headers | {"x-request-id": "mine"})
                client.get("/metrics", headers=headers)
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0)) as connection:
            connection.sendall(f"{secret} {keys['alice']}\r\n\r\n".encode())
            connection.recv(65536)
        log = server.log.read_text()
    assert "ready: model" in log  # the twin: what is logged is seen
    assert "refused " in log  # with the id, which callers choose so that it is found
    assert secret not in log
    assert not [name for name, key in keys.items() if key in log or re.search(key[8:], log)]
