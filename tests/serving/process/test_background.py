"""The queue beside the request path: when its items are delivered."""

import queue

from slipway.serving.process.background import BackgroundQueue

LONG_S, SOON_S = 600.0, 20.0  # the gathering time of the tests, and the longest time that they wait


def test_a_background_queue_delivers_early_once_it_is_half_full() -> None:
    delivered: queue.Queue[list[int]] = queue.Queue()

    def deliver(items: list[int]) -> bool:
        delivered.put(items)
        return True

    background = BackgroundQueue("test-background", deliver, max_items=4, gather_s=LONG_S)
    assert background.put(1)
    assert background.put(2)
    assert delivered.get(timeout=SOON_S) == [1, 2]
    assert background.put(3)
    assert delivered.empty()  # still gathering
    background.close()
    assert delivered.get(timeout=SOON_S) == [3]
