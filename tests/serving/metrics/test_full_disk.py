"""A full disk under BENTOML_HOME, where metrics are stored, costs no request and no worker."""

import errno
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.mmap_dict import MmapedDict

from slipway.serving.metrics import worker_files
from slipway.serving.metrics.worker_files import ClaimedFile, create_claimed_file, merged
from slipway.system.files import claim_space
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.metrics.test_worker_files import exposition, worker
from tests.serving.server import Server, running, until

PNG = {"content-type": "image/png"}


class Disk:
    """A simulated disk that may be full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        self._claim = claim_space
        monkeypatch.setattr(worker_files, "claim_space", self._claim_space)
        monkeypatch.setattr(worker_files, "_RETRY_S", 0.0)

        monkeypatch.setattr(worker_files, "_unclaimed", set())

    def _claim_space(self, path: Path) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self._claim(path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def shown(path: Path) -> dict[str, float]:
    entries = MmapedDict.read_all_values_from_file(str(path))  # type: ignore[no-untyped-call]
    return {key: value for key, value, _, _ in entries}


def test_counters_increased_on_a_full_disk_are_exposed_once_there_is_space(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "counter_7.db"
    file = ClaimedFile(str(path))
    file.write_value("a", 1.0, 0.0)
    file.write_value("b", 2.0, 0.0)
    assert file.read_value("b") == (2.0, 0.0)  # type: ignore[no-untyped-call]
    assert shown(path) == {}
    assert path.stat().st_blocks == 0  # nothing was touched
    disk.is_full = False
    file.write_value("a", 3.0, 0.0)
    assert shown(path) == {"a": 3.0, "b": 2.0}
    assert caplog.text.count("cannot write metrics to disk") == 1
    file.close()  # type: ignore[no-untyped-call]


def test_a_growing_metrics_file_has_all_its_blocks_or_stays_unchanged(
    tmp_path: Path, disk: Disk
) -> None:
    path = tmp_path / "counter_7.db"
    disk.is_full = False
    file = ClaimedFile(str(path))
    names = [f"series {number} {'x' * 200}" for number in range(1600)]
    for number, name in enumerate(names):
        disk.is_full = number >= 900
        file.write_value(name, float(number), 0.0)
    before = shown(path)
    assert 900 < len(before) < 1600
    assert all(before[name] == float(number) for number, name in enumerate(names[: len(before)]))
    disk.is_full = False
    file.write_value(names[0], 7.0, 0.0)
    assert shown(path) == {name: float(number) for number, name in enumerate(names)} | {
        names[0]: 7.0
    }
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    file.close()  # type: ignore[no-untyped-call]


def test_metrics_file_of_an_earlier_process_with_the_same_id_is_reused(
    tmp_path: Path, disk: Disk
) -> None:
    path = tmp_path / "counter_7.db"
    for is_full, expected in ((False, 1.0), (True, 1.0), (False, 2.0)):
        disk.is_full = is_full
        file = ClaimedFile(str(path))
        file.write_value("a", file.read_value("a")[0] + 1.0, 0.0)  # type: ignore[no-untyped-call]
        assert shown(path) == {"a": expected}
        file.close()  # type: ignore[no-untyped-call]


def test_counts_of_dead_workers_are_exposed_even_without_space_for_their_sum(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (1, 2):
        worker(tmp_path, number).communicate()
    names = {path.name for path in tmp_path.glob("*.db")}
    for _ in range(2):
        with merged(tmp_path):
            assert 'asked_total{code="200"} 3.0' in exposition(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names | {"dead_workers.lock"}
    assert caplog.text.count("cannot merge the metrics") == 1
    disk.is_full = False
    with merged(tmp_path):
        assert 'asked_total{code="200"} 3.0' in exposition(tmp_path)
    assert {path.name for path in tmp_path.glob("*.db")} == {"counter_0.db", "histogram_0.db"}
    assert not worker_files._has_failed


def test_file_for_the_sum_of_dead_workers_is_allocated_before_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "counter_0.new"
    create_claimed_file(path, 300_000)
    assert path.stat().st_size == 300_000
    assert path.stat().st_blocks * 512 >= 300_000


def can_mount() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    )


@pytest.mark.nightly(seconds=13)
def test_a_full_metrics_disk_kills_no_worker_fails_no_request_and_counters_rise(
    tmp_path: Path,
) -> None:
    if not can_mount():
        pytest.skip("no right to mount a file system here")
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    home = tmp_path / "bentoml"
    home.mkdir()
    on_a_disk = (
        "unshare",
        "-m",
        "bash",
        "-c",
        f'mount -t tmpfs -o size=4m none {home} && exec "$@"',
        "bash",
    )
    each_on_its_own = httpx.Limits(
        max_keepalive_connections=0
    )  # none may be one of a worker that is killed
    with (
        running(tmp_path, under=on_a_disk, workers=2) as server,
        httpx.Client(trust_env=False, limits=each_on_its_own) as client,
    ):
        until(lambda: num_ready(server) == 2)  # each on a disk with room
        before = alive(server)
        assert len(before) == 2
        inside = ("nsenter", "-t", str(server.process.pid), "-m")

        def fill() -> None:
            done = subprocess.run(
                [
                    *inside,
                    "dd",
                    "if=/dev/zero",
                    f"of={home}/filler",
                    "bs=4k",
                    "oflag=append",
                    "conv=notrunc",
                ],
                capture_output=True,
            )
            assert b"No space left on device" in done.stderr

        def ask(path: str = "/predict", content: bytes = picture(), **headers: str) -> int:
            return client.post(
                server.url + path, content=content, headers=PNG | headers
            ).status_code

        def counted(code: str) -> float:
            text = client.get(server.url + "/metrics").text
            found = re.findall(
                rf'^slipway_requests_total\{{code="{code}",route="/predict"\}} (\S+)$',
                text,
                re.MULTILINE,
            )
            return sum(map(float, found))

        assert ask() == 200
        fill()
        for _ in range(50):
            assert ask() == 200
            assert ask(content=b"no image") == 422  # a series that was not there before
        until(lambda: counted("200") >= 51 and counted("422") >= 50)
        assert alive(server) == before
        fill()
        os.kill(before[0], signal.SIGKILL)
        until(
            lambda: num_ready(server) == 3, 60
        )  # nobody scrapes, which would give the dead one's gauges back: the disk stays full
        assert (
            server.log.read_text().count("cannot write metrics to disk") == 1
        )  # and not for each of its files
        last = alive(server)
        for _ in range(50):
            assert ask() == 200
            assert counted("200") >= 51
            fill()
        subprocess.run([*inside, "rm", f"{home}/filler"], check=True)
        time.sleep(1.5)
        for _ in range(50):
            assert ask() == 200
        until(lambda: counted("200") == 151)
        assert alive(server) == last


def num_ready(server: Server) -> int:
    """Return the number of workers that have been ready so far."""
    return server.log.read_text().count("ready: model")


def alive(server: Server) -> list[int]:
    """Return the ids of workers that are not zombies."""
    return [
        one
        for one in server.workers()
        if "bentoml" in Path(f"/proc/{one}/cmdline").read_bytes().decode(errors="replace")
    ]
