"""Four times as much asked for as can be answered, against the real process: what is let in is quick, the rest is told so at once.

Other load on the machine moves what the service can do while it is measured, so the figures may be missed twice. What is answered may
never be wrong.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from serving.load_test.load import (
    Answer,
    by_status,
    closed_loop,
    http_request,
    latency,
    open_loop,
    run,
)
from tests.serving.bundles import certify, picture, slow_classifier, write_bundle
from tests.serving.server import Server, free_port, running

pytestmark = pytest.mark.nightly
ATTEMPTS = 3
IMAGES = [http_request(body=picture(number)) for number in range(8)]
LIVEZ = http_request("/livez", method="GET")


def image(number: int) -> bytes:
    return IMAGES[number % len(IMAGES)]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that takes several milliseconds for an image, on one core, so that the client has the other."""
    folder = tmp_path_factory.mktemp("slow")
    certify(folder / "certificate.json", write_bundle(folder / "bundle", slow_classifier(24)))
    with running(folder, num_threads=1) as server:
        server.wait()
        yield server


@dataclass
class Measured:
    """One load, with somebody who asks for /livez meanwhile."""

    rate: float
    seconds: float
    answers: list[Answer]
    livez: list[Answer]

    @property
    def goodput(self) -> float:
        return by_status(self.answers)[200] / self.seconds

    @property
    def lasting(self) -> list[Answer]:
        """What was asked after the first second: until then it may have been a burst."""
        return [answer for answer in self.answers if answer.due > self.answers[0].due + 1]


def load(url: str, rate: float, seconds: float, probed: str | None = None) -> Measured:
    """`probed` is where /livez is asked, if that is elsewhere."""

    async def both() -> tuple[list[Answer], list[Answer]]:
        probing = open_loop(probed or url, lambda number: LIVEZ, 20, seconds, seed=1)
        return await asyncio.gather(open_loop(url, image, rate, seconds), probing)

    answers, livez = run(both())
    return Measured(rate, seconds, sorted(answers, key=lambda answer: answer.due), livez)


def check_answers(measured: Measured) -> None:
    """What holds however slow the machine is."""
    assert set(by_status(measured.answers)) <= {200, 429, 503}
    assert set(by_status(measured.livez)) == {200}
    for answer in measured.answers:
        if answer.status != 200:
            assert int(answer.headers[b"retry-after"]) >= 1
            assert answer.content["error"]["code"] in ("queue_full", "too_many_connections")


def missed(server: Server) -> list[str]:
    """The figures that were missed."""
    run(closed_loop(server.url, image, 32, seconds=0.5))
    peak = len(run(closed_loop(server.url, image, 32, seconds=2))) / 2
    normal, overload = load(server.url, 0.8 * peak, 4), load(server.url, 4 * peak, 5)
    time.sleep(3)
    after = load(server.url, 0.8 * peak, 2)
    for measured in (normal, overload, after):
        check_answers(measured)
    assert by_status(overload.answers)[429] > 0.3 * len(overload.answers)
    usual = latency(normal.answers)
    figures = {
        f"refused at 80 % of {peak:.0f} images/s: {by_status(normal.answers)}": by_status(
            normal.answers
        )[200]
        == len(normal.answers),
        f"goodput {overload.goodput:.0f} of {peak:.0f}": overload.goodput >= 0.9 * peak,
        f"p99 {latency(overload.lasting):.3f} s, at 80 % {usual:.3f}": latency(overload.lasting)
        <= 2 * usual,
        f"/livez p99 {latency(overload.livez):.3f} s": latency(overload.livez) < 0.1,
        f"5 s later {by_status(after.answers)}": by_status(after.answers)[200]
        == len(after.answers),
        f"5 s later p99 {latency(after.answers):.3f} s": latency(after.answers) <= 2 * usual,
    }
    return [figure for figure, is_met in figures.items() if not is_met]


def test_a_lasting_overload_leaves_throughput_and_waiting_as_they_were(slow: Server) -> None:
    rounds: list[list[str]] = []
    for _ in range(ATTEMPTS):
        rounds.append(missed(slow))
        if not rounds[-1]:
            return
    pytest.fail("\n".join(map(str, rounds)))


def test_a_model_quicker_than_its_callers_answers_all_it_can_and_resets_nothing(
    tmp_path: Path,
) -> None:
    """Here reading requests is the limit, not the model: callers wait in their connections, or are told that there are too many.

    Every request has a connection of its own. Probes have the port of operators, where callers do not stand in line before them.
    """
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    port = free_port()
    with running(tmp_path, admin_port=port) as server:
        server.wait()
        probed = f"http://127.0.0.1:{port}"
        peak = len(run(closed_loop(server.url, image, 32, seconds=1)))
        overload = load(server.url, 4 * peak, 3, probed)
        check_answers(overload)
        time.sleep(1)
        check_answers(load(server.url, 0.3 * peak, 1, probed))
        assert by_status(overload.answers)[200] > peak / 2
