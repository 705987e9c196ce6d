"""The real process: behaviour that only shows over a socket, under load, at start or at exit."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from slipway.inputs.images import array_from_bytes
from slipway.serving.http.responses import ERRORS
from tests import plain_http
from tests.serving.bundles import CONTRACT, LABELS, certify, picture, probabilities, write_bundle
from tests.serving.server import ROOT, Server, environment, free_port, running, until

pytestmark = pytest.mark.process
PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("service")
    certify(root / "certificate.json", write_bundle(root / "bundle"))
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running(folder, max_body_bytes=200_000) as server:
        server.wait()
        yield server


def is_right(answer: httpx.Response, payload: bytes) -> bool:
    expected = probabilities(array_from_bytes(payload, CONTRACT)[None])[0]
    return answer.status_code == 200 and np.allclose(
        list(answer.json()["probabilities"].values()), expected, atol=1e-6
    )


@pytest.mark.nightly
def test_the_service_is_ready_within_5_seconds_on_one_core(tmp_path: Path) -> None:
    """Measures processor time, an upper bound that other load on the machine does not change."""
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    with running(tmp_path) as server:
        server.wait()
        assert 0.1 < cpu_seconds(server.process.pid) + cpu_seconds(server.worker()) < 5


def cpu_seconds(process: int) -> float:
    """Return the user and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_the_service_process_does_not_load_torch(server: Server) -> None:
    plain_http.post(server.url + "/predict", content=picture(), headers=PNG)
    maps = Path(f"/proc/{server.worker()}/maps").read_text()
    assert "onnxruntime" in maps  # the twin: what is loaded is seen
    assert not re.search(r"/(torch|onnx)/", maps)


def test_requests_sent_by_curl_get_predictions(server: Server, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(picture(5, (30, 20)))
    for arguments in (
        ["-F", "image=@x.png"],
        ["-H", "content-type: image/png", "--data-binary", "@x.png"],
    ):
        command = [
            "curl",
            "-s",
            "-o",
            "answer",
            "-w",
            "%{http_code}",
            *arguments,
            server.url + "/predict",
        ]
        assert (
            subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
            == "200"
        )
        assert b'"label"' in (tmp_path / "answer").read_bytes()


def test_bentoml_client_receives_the_same_prediction_as_http(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "x.png").write_bytes(picture(6))
    script = f"""
import json, pathlib, bentoml
with bentoml.SyncHTTPClient({server.url!r}) as client:
    print(json.dumps(client.predict(image=pathlib.Path("x.png"))))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    raw = plain_http.post(server.url + "/predict", content=picture(6), headers=PNG).json()
    assert json.loads(done.stdout) | {"request_id": raw["request_id"]} == raw
    assert raw["label"] in LABELS


def test_bentoml_client_may_send_several_images(server: Server, tmp_path: Path) -> None:
    images = [picture(6), picture(7)]
    for name, image in zip(("first.png", "second.png"), images, strict=True):
        (tmp_path / name).write_bytes(image)
    script = f"""
import json, pathlib, bentoml
with bentoml.SyncHTTPClient({server.url!r}) as client:
    print(json.dumps(client.predict(image=[pathlib.Path("first.png"), pathlib.Path("second.png")])))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    alone = [
        plain_http.post(server.url + "/predict", content=image, headers=PNG).json()
        for image in images
    ]
    for found, expected in zip(json.loads(done.stdout)["predictions"], alone, strict=True):
        assert found["label"] == expected["label"]
        assert found["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-5)


def test_bentoml_service_behind_the_application_gives_the_same_prediction(
    server: Server, folder: Path
) -> None:
    """A call as by another service through `bentoml.depends`."""
    script = f"""
import json, slipway.serving.service as service
from starlette.testclient import TestClient
right = ("x.png", {picture(8)!r}, "image/png")
with TestClient(service.Slipway.to_asgi(is_main=False)) as client:
    client.portal.call(service.worker().loaded)
    print(json.dumps(client.post("/predict", files={{"image": right}}).json()))
    print(client.post("/predict", files={{"image": ("x.png", b"text", "image/png")}}).status_code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    answer, status = done.stdout.splitlines()[-2:]
    application = plain_http.post(server.url + "/predict", content=picture(8), headers=PNG).json()
    assert json.loads(answer) | {"request_id": application["request_id"]} == application
    assert status == "422"


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png_of(width: int, height: int) -> bytes:
    """Return a grey PNG of any size in few bytes."""
    rows = zlib.compressobj(9)
    body = b"".join(rows.compress(bytes(width + 1)) for _ in range(height)) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def form(*parts: bytes, boundary: bytes = b"b", closed: bool = True) -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + (
        b"--" + boundary + b"--\r\n" if closed else b""
    )


FILE = b'Content-Disposition: form-data; name="image"; filename="x.png"\r\n\r\n'
TEXT = b'Content-Disposition: form-data; name="image"\r\n\r\n'
OTHER = b'Content-Disposition: form-data; name="other"; filename="x"\r\n\r\n'
FORM = {"content-type": "multipart/form-data; boundary=b"}
JSON = {"content-type": "application/json"}
GOOD = picture(1)
MALFORMED: list[tuple[str, str, dict[str, str], bytes]] = [
    ("POST", "/predict", PNG, b""),
    ("POST", "/predict", PNG, b"this is text"),
    ("POST", "/predict", PNG, b"\0" * 100),
    ("POST", "/predict", PNG, b"http://127.0.0.1:1/x.png"),
    ("POST", "/predict", PNG, picture(1, (40, 40))[:-300]),
    ("POST", "/predict", PNG, GOOD[:20]),
    ("POST", "/predict", PNG, GOOD[:40]),
    ("POST", "/predict", PNG, picture(1, (40, 40), "JPEG")[:200]),
    ("POST", "/predict", PNG, b"GIF89a" + b"\1" * 50),
    ("POST", "/predict", PNG, b"RIFF\x10\0\0\0WEBPVP8 " + b"\0" * 20),
    ("POST", "/predict", PNG, b"BM" + b"\xff" * 60),
    ("POST", "/predict", PNG, b"II*\0" + b"\xff" * 60),
    ("POST", "/predict", PNG, b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
    ("POST", "/predict", PNG, png_of(10_000, 10_000)),
    ("POST", "/predict", PNG, b"x" * 200_001),
    ("POST", "/predict", {}, GOOD),
    ("POST", "/predict", {"content-type": "text/plain"}, GOOD),
    (
        "POST",
        "/predict",
        {"content-type": "application/x-www-form-urlencoded"},
        b"image=http://127.0.0.1:1/x.png",
    ),
    ("POST", "/predict", {"content-type": "application/vnd.bentoml+pickle"}, b"\x80\x05N."),
    ("POST", "/predict", {"content-type": ";;;"}, GOOD),
    ("POST", "/predict", JSON, b'{"image": "http://127.0.0.1:1/x.png"}'),
    ("POST", "/predict", JSON, b'{"image": NaN}'),
    ("POST", "/predict", JSON, b"1e999"),
    ("POST", "/predict", {"content-type": "multipart/form-data"}, form(FILE + GOOD)),
    ("POST", "/predict", FORM, b""),
    ("POST", "/predict", FORM, b"no form"),
    ("POST", "/predict", FORM, form()),
    ("POST", "/predict", FORM, form(FILE + GOOD, closed=False)),
    ("POST", "/predict", FORM, form(FILE + GOOD, boundary=b"c")),
    ("POST", "/predict", FORM, form(FILE)),
    ("POST", "/predict", FORM, form(FILE + b"text")),
    ("POST", "/predict", FORM, form(TEXT + GOOD)),
    ("POST", "/predict", FORM, form(TEXT + b"http://127.0.0.1:1/x.png")),
    ("POST", "/predict", FORM, form(OTHER + GOOD)),
    ("POST", "/predict", FORM, form(FILE + GOOD, OTHER + b"\xff\xfe")),
    ("POST", "/predict", FORM, form(FILE + GOOD, FILE)),
    ("POST", "/predict", FORM, form(*[FILE + GOOD] * 65)),
    ("POST", "/predict", FORM, form(b"no header\r\n\r\n" + GOOD)),
    ("POST", "/predict/", PNG, GOOD),
    ("POST", "/predict/submit", PNG, GOOD),
    ("POST", "/%00", PNG, GOOD),
    ("GET", "/predict", {}, b""),
    ("DELETE", "/model", {}, b""),
    ("POST", "/metrics", {}, b"x"),
    ("GET", "/static_content/index.html", {}, b""),
    ("GET", "/../../etc/passwd", {}, b""),
]


def test_malformed_requests_get_4xx_in_one_shape_and_later_valid_ones_get_predictions(
    server: Server,
) -> None:
    with httpx.Client(base_url=server.url) as client:
        for number, (method, path, headers, content) in enumerate(MALFORMED):
            answer = client.request(method, path, headers=headers, content=content)
            assert 400 <= answer.status_code < 500, (number, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"code", "message", "field", "request_id"}, number
            assert ERRORS[error["code"]] == answer.status_code, number
            payload = picture(number)
            assert is_right(client.post("/predict", content=payload, headers=PNG), payload), number


def test_a_connection_survives_a_refused_upload(server: Server) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(5):
            declared = client.post("/predict", content=b"x" * 5_000_000, headers=PNG)
            chunked = client.post("/predict", content=iter([b"x" * 100_000] * 30), headers=PNG)
            assert (declared.status_code, chunked.status_code) == (413, 413)
            assert is_right(client.post("/predict", content=GOOD, headers=PNG), GOOD)


def test_the_service_never_fetches_a_url(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bait:
        bait.settimeout(1)
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/x.png".encode()
        for headers, content in (
            (FORM, form(TEXT + url)),
            (FORM, form(FILE + url)),
            (PNG, url),
            (JSON, url),
            ({}, url),
        ):
            assert plain_http.post(
                server.url + "/predict", headers=headers, content=content
            ).status_code in (415, 422)
        with pytest.raises(TimeoutError):
            bait.accept()


def test_a_refused_100_megapixel_image_costs_at_most_20_megabytes(server: Server) -> None:
    bomb = png_of(10_000, 10_000)
    assert len(bomb) < 200_000
    before = peak_memory(server)
    for _ in range(5):
        answer = plain_http.post(server.url + "/predict", content=bomb, headers=PNG)
        assert answer.json()["error"]["code"] == "pixel_bomb"
    assert peak_memory(server) - before < 20e6


def peak_memory(server: Server) -> float:
    """Return the worker's peak memory in bytes."""
    status = Path(f"/proc/{server.worker()}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found.group(1)) * 1024.0


def test_concurrent_callers_get_their_own_predictions(server: Server) -> None:
    payloads = [picture(number, (12, 9)) for number in range(200)]
    with httpx.Client(base_url=server.url) as client, ThreadPoolExecutor(16) as threads:
        answers = list(
            threads.map(
                lambda payload: client.post("/predict", content=payload, headers=PNG), payloads
            )
        )
    assert all(is_right(answer, payload) for answer, payload in zip(answers, payloads, strict=True))


def counted(server: Server) -> Counter[int]:
    """Return the requests of /predict in /metrics, by status."""
    text = plain_http.get(server.url + "/metrics").text
    return Counter(
        {
            int(code): int(float(n))
            for code, n in re.findall(
                r'requests_total\{code="(\d+)",route="/predict"\} (\S+)', text
            )
        }
    )


def test_request_counters_equal_the_callers_own_counts(server: Server) -> None:
    before = counted(server)
    contents = [GOOD, b"text", b"", b"x" * 300_000] * 25
    with httpx.Client(base_url=server.url) as client, ThreadPoolExecutor(8) as threads:
        seen = Counter(
            threads.map(
                lambda content: client.post("/predict", content=content, headers=PNG).status_code,
                contents,
            )
        )
    assert counted(server) - before == seen == Counter({200: 25, 422: 50, 413: 25})


def test_unknown_paths_add_no_metric_series(server: Server) -> None:
    def series() -> set[str]:
        return {
            line.rpartition(" ")[0]
            for line in client.get("/metrics").text.splitlines()
            if not line.startswith("#")
        }

    with httpx.Client(base_url=server.url) as client:
        client.get("/scan/0")
        series()  # which is counted as well
        before = series()
        for number in range(500):
            client.get(f"/scan/{number}", headers={"x-request-id": str(number)})
        assert series() == before
        assert len(before) < 300


def test_a_tampered_bundle_leaves_the_service_alive_and_not_ready_with_the_reason(
    tmp_path: Path,
) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    model = tmp_path / "bundle/model_fp32.onnx"
    model.write_bytes(model.read_bytes()[:-1] + b"\0")
    with running(tmp_path) as server:
        server.wait("/livez")
        server.wait("/readyz", 503)
        time.sleep(1)
        for answer in (
            plain_http.get(server.url + "/readyz"),
            plain_http.post(server.url + "/predict", content=GOOD, headers=PNG),
        ):
            assert answer.status_code == 503
            assert "was altered" in answer.json()["error"]["message"]
        assert server.log.read_text().count("was altered") == 1


def test_service_finishes_requests_in_flight_after_sigterm(tmp_path: Path) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    answers: list[httpx.Response] = []
    with running(tmp_path) as server:
        server.wait()
        arriving = threading.Event()

        def slowly() -> Iterator[bytes]:
            yield GOOD[:50]
            arriving.set()
            time.sleep(1)
            yield GOOD[50:]

        caller = threading.Thread(
            target=lambda: answers.append(
                plain_http.post(server.url + "/predict", content=slowly(), headers=PNG)
            )
        )
        caller.start()
        arriving.wait(10)
        server.process.send_signal(signal.SIGTERM)
        caller.join(10)
        assert server.process.wait(10) == 0
    assert is_right(answers[0], GOOD)


def test_metrics_of_either_worker_cover_both_and_survive_the_others_death(tmp_path: Path) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    with running(tmp_path, workers=2) as server:
        server.wait()
        for _ in range(100):
            assert (
                plain_http.post(server.url + "/predict", content=GOOD, headers=PNG).status_code
                == 200
            )
        until(
            lambda: counted(server)[200] == 100
        )  # a killed worker loses what it counted in the last twentieth of a second
        os.kill(server.worker(), signal.SIGKILL)
        time.sleep(0.2)
        for _ in range(20):
            assert (
                plain_http.post(server.url + "/predict", content=GOOD, headers=PNG).status_code
                == 200
            )
        assert counted(server)[200] == 120


def refused_start(folder: Path, port: int, **settings: object) -> str:
    """Return the output of a `bentoml serve` that does not start."""
    command = [
        sys.executable,
        "-m",
        "bentoml",
        "serve",
        "slipway.serving.service:Slipway",
        "--port",
        str(port),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(folder, **settings),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    return done.stderr


def test_start_on_a_port_in_use_ends_with_one_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused_start(folder, port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in message
    assert len(message.strip().splitlines()) == 1


def test_start_with_invalid_settings_ends_and_lists_all_of_them(folder: Path) -> None:
    message = refused_start(folder, free_port(), workers=0, privider="cpu")
    assert "SLIPWAY_WORKERS" in message
    assert "did you mean SLIPWAY_PROVIDER" in message
