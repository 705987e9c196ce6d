"""The resources of a service stay constant over tens of thousands of mixed requests."""

import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from slipway.serving.load_test.load import REFUSED, ask_each, by_status, http_request
from tests import plain_http
from tests.serving.generated import image_case
from tests.serving.ready_service import ready_service
from tests.serving.server import Server

pytestmark = pytest.mark.process
GROWTH_BYTES = 10_000_000
SCRAPE = http_request("/metrics", method="GET")
CASES = [image_case(seed).request for seed in range(600)]


def unknown(number: int) -> bytes:
    """Return a request with a new path, id, query and header."""
    headers = [("x-request-id", f"scan-{number}"), (f"x-{number}", str(number))]
    return http_request(
        f"/scan/{number}?{number}",
        method=random.Random(number).choice(["GET", "PUT", "DELETE"]),
        headers=headers,
    )


def closing(request: bytes) -> bytes:
    return request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)


def mixed(num_requests: int, first_unknown: int) -> list[bytes]:
    """Return mixed requests: one in five has a new path, one in twenty closes its connection."""
    requests = [
        unknown(first_unknown + number) if number % 5 == 0 else CASES[number * 7 % len(CASES)]
        for number in range(num_requests)
    ]
    return [
        closing(request) if number % 20 == 3 else request for number, request in enumerate(requests)
    ]


class Held:
    """The resources that the worker and the server above it hold."""

    def __init__(self, server: Server) -> None:
        time.sleep(0.5)  # connections that were closed are forgotten
        processes = [server.process.pid, *server.workers()]
        statuses = [Path(f"/proc/{process}/status").read_text() for process in processes]
        self.memory_bytes = sum(_number("VmRSS", status) * 1024 for status in statuses)
        self.num_threads = sum(_number("Threads", status) for status in statuses)
        self.num_descriptors = sum(
            len(list(Path(f"/proc/{process}/fd").iterdir())) for process in processes
        )
        plain_http.get(server.url + "/metrics")  # which is counted, too
        self.series = {
            line.rpartition(" ")[0]
            for line in plain_http.get(server.url + "/metrics").text.splitlines()
            if line[0] != "#"
        }


def _number(name: str, status: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    assert found
    return int(found.group(1))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready_service(tmp_path_factory.mktemp("steady"), max_body_bytes=200_000) as server:
        yield server


def ask(server: Server, requests: Sequence[bytes]) -> None:
    seen = by_status(ask_each(server.url, requests, 16))
    assert max(seen) < 500
    assert seen[REFUSED] == 0


@pytest.mark.parametrize(
    ("num_first", "num_requests"),
    [(2000, 5000), pytest.param(2000, 50_000, marks=pytest.mark.nightly)],
)
def test_memory_threads_descriptors_and_series_stay_constant_under_load(
    server: Server, num_first: int, num_requests: int, is_nightly: bool
) -> None:
    ask(server, mixed(num_first, first_unknown=0))
    ask_each(
        server.url, [SCRAPE] * 200, 32
    )  # its threads start one by one, as many as are wanted at a time
    before = Held(server)
    ask(server, mixed(num_requests, first_unknown=num_first))
    after = Held(server)
    assert after.memory_bytes - before.memory_bytes < GROWTH_BYTES
    assert (after.num_threads, after.num_descriptors) == (
        before.num_threads,
        before.num_descriptors,
    )
    assert after.series == before.series
    assert len(after.series) <= 300
    scrapes = ask_each(server.url, [SCRAPE] * 9, 1)
    assert by_status(scrapes) == {200: 9}
    assert not is_nightly or statistics.median(scrape.seconds for scrape in scrapes) < 0.1


def test_the_check_for_steady_resources_finds_growing_ones(server: Server) -> None:
    """The check notices an extra connection, an extra thread and a new series."""
    before = Held(server)
    with httpx.Client(base_url=server.url) as client:
        client.get("/livez")
        client.request("PATCH", "/healthz")
        after = Held(server)
    assert after.num_descriptors == before.num_descriptors + 1
    assert after.series > before.series or 'route="/healthz"' in str(before.series)
    assert before.memory_bytes > 50_000_000
    assert before.num_threads > 3
