"""The request log of a real service, with a killed worker, and a read-only or full disk."""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from slipway.replay.service import outputs_of
from slipway.traffic.request_log import DamagedLine, LoggedRequest, read_requests, segments
from tests.serving.bundles import LABELS, certify, picture, write_bundle
from tests.serving.server import ROOT, Server, running, until

pytestmark = pytest.mark.process
PNG = {"content-type": "image/png"}
MIB = 1 << 20


CLIENT = httpx.Client(trust_env=False)


def ask(server: Server, number: int, **headers: str) -> httpx.Response:
    return CLIENT.post(server.url + "/predict", content=picture(number), headers=PNG | headers)


def counted(server: Server, outcome: str) -> int:
    text = CLIENT.get(server.url + "/metrics").text
    found = re.search(
        rf'^slipway_logged_requests_total\{{outcome="{outcome}"\}} (\S+)$', text, re.MULTILINE
    )
    return int(float(found[1])) if found else 0


def wait_for(server: Server, outcome: str, count: int) -> None:
    end = time.monotonic() + 15
    while counted(server, outcome) < count:
        assert time.monotonic() < end, f"{outcome} is {counted(server, outcome)}, expected {count}"
        time.sleep(0.05)


def logged_in(folder: Path) -> list[LoggedRequest]:
    found = list(read_requests(folder))
    assert not [one for one in found if isinstance(one, DamagedLine)]
    return [one for one in found if isinstance(one, LoggedRequest)]


def size(folder: Path) -> int:
    """Return the total size of the segments in `folder`, in bytes."""
    total = 0
    for path in segments(folder):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("log")
    certify(root / "certificate.json", write_bundle(root / "bundle"))
    return root


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    CLIENT.close()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running(
        folder, workers=2, request_log_directory=folder / "log", request_log_bytes=MIB
    ) as server:
        server.wait()
        yield server


def test_request_log_of_two_workers_is_readable_by_the_owner_only(
    server: Server, folder: Path
) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: ask(server, number).json(), range(100)))
    wait_for(server, "logged", 100)
    logged = {request.request_id: request for request in logged_in(folder / "log")}
    manifest = write_bundle(folder / "same").manifest
    for number, answer in enumerate(answers):
        request = logged[answer["request_id"]]
        assert request.payload == picture(number)
        outputs = outputs_of([answer], manifest)
        assert {name: numbers.tolist() for name, numbers in outputs.items()} == {
            name: numbers.tolist() for name, numbers in request.outputs.items()
        }
        assert LABELS[int(request.outputs["probabilities"].argmax())] == answer["label"]
    assert stat.S_IMODE((folder / "log").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in segments(folder / "log")} == {0o600}


def test_requests_logged_by_a_killed_worker_stay_readable(server: Server, folder: Path) -> None:
    before = counted(server, "logged")
    ids: list[str] = []
    while len(ids) < 60:
        ids.append(ask(server, len(ids)).json()["request_id"])
    wait_for(server, "logged", before + 60)
    os.kill(server.worker(), signal.SIGKILL)
    while len(ids) < 120:
        with suppress(httpx.TransportError):  # in the killed worker
            ids.append(ask(server, len(ids)).json()["request_id"])
    until(lambda: set(ids) <= {request.request_id for request in logged_in(folder / "log")})
    assert counted(server, "failed") == counted(server, "dropped") == 0


def test_request_log_folder_is_bounded_over_both_workers(server: Server, folder: Path) -> None:
    before = counted(server, "logged")
    payloads = [picture(number, (60, 60)) for number in range(150)]  # 15 kB per line
    for payload in payloads:
        assert CLIENT.post(server.url + "/predict", content=payload, headers=PNG).status_code == 200
        assert size(folder / "log") <= MIB
    wait_for(server, "logged", before + 150)
    logged = [request.payload for request in logged_in(folder / "log")]
    assert payloads[-1] in logged
    assert payloads[0] not in logged  # the oldest are deleted


def test_replay_queries_the_running_service_and_is_not_logged(server: Server, folder: Path) -> None:
    request_id = ask(server, 7, **{"x-request-id": "to-replay"}).json()["request_id"]
    until(lambda: request_id in {request.request_id for request in logged_in(folder / "log")})
    arguments = [request_id, "--request-log", "log", "--bundle", "bundle", "--url", server.url]
    done = subprocess.run(
        [sys.executable, "-m", "slipway.replay", *arguments],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^service +onnxruntime/cpu/fp32 +0 +\w+ +equal$", done.stdout, re.MULTILINE)
    time.sleep(0.3)
    assert [
        one.request_id for one in logged_in(folder / "log") if one.request_id.startswith("replay-")
    ] == []


def can_mount() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    )


@pytest.mark.nightly(seconds=10)
def test_read_only_or_full_disk_fails_no_request_and_logging_resumes(
    folder: Path, tmp_path: Path
) -> None:
    if not can_mount():
        pytest.skip("no right to mount a file system here")
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    disk = tmp_path / "disk"
    disk.mkdir()
    on_a_disk = (
        "unshare",
        "-m",
        "bash",
        "-c",
        f'mount -t tmpfs -o ro,size=256k none {disk} && exec "$@"',
        "bash",
    )
    with running(
        tmp_path, under=on_a_disk, request_log_directory=disk / "log", request_log_bytes=8 * MIB
    ) as server:
        server.wait()

        def remount(options: str) -> None:
            subprocess.run(
                [
                    "nsenter",
                    "-t",
                    str(server.process.pid),
                    "-m",
                    "mount",
                    "-o",
                    f"remount,{options}",
                    disk,
                ],
                check=True,
            )

        def require_all_answered(num_requests: int) -> None:
            payload = picture(1, (40, 40))
            codes = {
                CLIENT.post(server.url + "/predict", content=payload, headers=PNG).status_code
                for _ in range(num_requests)
            }
            assert codes == {200}

        require_all_answered(20)
        wait_for(server, "failed", 20)
        assert counted(server, "logged") == 0
        remount("rw,size=256k")
        time.sleep(1.2)
        require_all_answered(30)
        time.sleep(0.5)
        require_all_answered(60)
        wait_for(server, "failed", 40)
        logged, failed = counted(server, "logged"), counted(server, "failed")
        assert logged > 0
        remount("rw,size=16m")
        time.sleep(1.2)
        require_all_answered(20)
        wait_for(server, "logged", logged + 20)
        assert counted(server, "failed") - failed <= 60
        entered = Path(f"/proc/{server.process.pid}/root{disk}/log")
        assert len(logged_in(entered)) == counted(server, "logged")
        log = server.log.read_text()
        assert log.count("cannot write the request log") == 2  # once per failure, not per request
        assert "Read-only file system" in log
        assert "No space left on device" in log
