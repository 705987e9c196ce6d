"""A live model: retiring it delays no other request, and an overload sheds its queue."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.serving.http.responses import Refusal
from slipway.serving.models.live_model import LiveModel
from slipway.serving.models.loader import load_model
from slipway.serving.requests import decoding, rows
from slipway.serving.rollout.candidate.canary import Canary, SeenIds
from slipway.serving.rollout.evidence import Evidence
from tests.serving.bundles import CONTRACT, picture
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import full_worker, put_in_place_of


class Gate:
    """A gate that blocks threads until it opens."""

    def __init__(self) -> None:
        self.open, self.reached, self.num_reached = threading.Event(), threading.Event(), 0
        self.num_held = 0

    def pass_through(self, *_: object) -> Any:
        self.num_reached += 1
        self.reached.set()
        self.num_held += 1
        is_open = self.open.wait(10)
        self.num_held -= 1
        assert is_open
        return np.zeros(CONTRACT.shape, np.uint8)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


async def abandoned(live: LiveModel, gate: Gate, *items: bytes) -> None:
    """Start to decode a request, which is cancelled before its decoding ends."""
    request = asyncio.create_task(live.decoder.decode(*items))
    while not gate.reached.is_set():
        await asyncio.sleep(0.001)
    request.cancel()
    with suppress(asyncio.CancelledError):
        await request


def test_a_retired_model_does_not_wait_for_cancelled_image_decoding(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr(decoding, "array_from_bytes", gate.pass_through)
    monkeypatch.setattr(decoding, "num_cores", lambda: 1)

    async def main() -> None:
        live = LiveModel(load_model(make_settings()), 8, lambda *_: None)
        await abandoned(live, gate, *[picture(number) for number in range(4)])
        await live.retire()
        assert gate.num_held == 1
        gate.open.set()
        await asyncio.sleep(0.1)
        assert gate.num_reached == 1  # those that had not begun never do

    asyncio.run(main())


@pytest.mark.usefixtures("certified_table")
def test_a_retired_model_does_not_wait_for_cancelled_row_decoding(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    monkeypatch.setattr(rows, "parse", gate.pass_through)

    async def main() -> None:
        live = LiveModel(load_model(make_settings()), 8, lambda *_: None)
        await abandoned(live, gate, b'{"rows": []}' + b" " * rows.INLINE_BYTES)
        await live.retire()
        assert gate.num_held == 1

    asyncio.run(main())


def test_an_overload_sheds_the_queue_of_a_canary_too(
    tmp_path: Path, make_settings: MakeSettings, gate: Gate
) -> None:
    """The rows that may stay are divided in proportion to the queues."""

    async def main() -> None:
        worker = full_worker(make_settings(max_batch_size=1))
        await worker.swap(load_model(worker.settings))
        canary = worker.make_live(load_model(worker.settings), "candidate")
        worker.router = Canary(canary, Evidence(), "salt", SeenIds(tmp_path / "of.used", "salt"))
        assert worker._live
        queues = []
        for live, num_waiting in ((worker._live, 9), (canary, 3)):
            gate.reached.clear()
            put_in_place_of(live, lambda batch: [gate.pass_through()] * len(batch))
            running = live.batcher.submit(np.zeros((1, *CONTRACT.shape), np.uint8))
            while not running.num_taken:
                await asyncio.sleep(0.001)
            queues.append(
                [
                    live.batcher.submit(np.zeros((1, *CONTRACT.shape), np.uint8))
                    for _ in range(num_waiting)
                ]
            )
        worker._shed(4)
        kept = [[not submission.answer.done() for submission in queue] for queue in queues]
        assert kept == [[True] * 3 + [False] * 6, [True] + [False] * 2]
        gate.open.set()
        for submission in (one for queue in queues for one in queue):
            with suppress(Refusal):
                await submission.answer
        worker.router = None
        await canary.retire()
        await worker.stop()

    asyncio.run(asyncio.wait_for(main(), 30))
