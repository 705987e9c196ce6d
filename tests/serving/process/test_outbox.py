"""The queue beside the request path: when its items are delivered."""

import queue

from slipway.serving.process.outbox import Outbox

LONG_S, SOON_S = 600.0, 20.0  # the gathering time of the tests, and the longest time that they wait


def test_an_outbox_delivers_early_once_it_is_half_full() -> None:
    delivered: queue.Queue[list[int]] = queue.Queue()

    def deliver(items: list[int]) -> bool:
        delivered.put(items)
        return True

    outbox = Outbox("test-outbox", deliver, max_items=4, gather_s=LONG_S)
    assert outbox.put(1)
    assert outbox.put(2)
    assert delivered.get(timeout=SOON_S) == [1, 2]
    assert outbox.put(3)
    assert delivered.empty()  # still gathering
    outbox.close()
    assert delivered.get(timeout=SOON_S) == [3]
