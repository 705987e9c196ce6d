"""Runs work outside the request path: a bounded queue with a thread, and a log based on it.

Neither ever delays or fails a request. Items that do not fit into the queue are dropped, items that
cannot be delivered have failed, and both are counted. A killed worker loses the items in its queue:
those of a tenth of a second, of half a second for the access log, of five seconds for traces.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from slipway.system.disk_faults import disk_fault
from slipway.traffic.request_log import SegmentWriter

logger = logging.getLogger("bentoml.slipway")

OUTCOMES = ("logged", "dropped", "failed")
_GATHER_S = 0.1  # default time in which items are gathered and then delivered together
_TIDY_S = 600.0  # longest pause between two removals of old segments, with an age limit
_CHUNK_BYTES = 1 << 20  # most bytes that are written at once
_CLOSE_S = 5.0  # longest time that the end of a worker waits for its disk

Count = Callable[[str, int], None]  # one of OUTCOMES, number of items
Item = TypeVar("Item")


class BackgroundQueue(Generic[Item]):
    """A bounded queue with a thread that passes the queued items to `deliver`.

    Items that arrive within `gather_s` are delivered together, earlier once the queue is half full.
    If `deliver` returns False, the thread pauses for `retry_s`. With `wake_s`, `deliver` is called
    at least that often, with an empty list if nothing is queued. `end` is called once, when the
    thread ends. Times are in seconds.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[list[Item]], bool],
        max_items: int,
        max_bytes: float = float("inf"),
        retry_s: float = 1.0,
        wake_s: float | None = None,
        gather_s: float = _GATHER_S,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._deliver, self._end = deliver, end
        self._max_items, self._max_bytes = max_items, max_bytes
        self._retry_s, self._wake_s, self._gather_s = retry_s, wake_s, gather_s
        self._lock = threading.Lock()
        self._waiting: deque[Item] = deque()
        self._waiting_bytes = 0
        self._arrived, self._due, self._closing = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Item, num_bytes: int = 0) -> bool:
        """Queue an item. Returns False if the queue is full. Never waits, never raises."""
        with self._lock:
            if (
                len(self._waiting) >= self._max_items
                or self._waiting_bytes + num_bytes > self._max_bytes
            ):
                return False
            self._waiting.append(item)
            self._waiting_bytes += num_bytes
            if len(self._waiting) >= self._max_items // 2:
                self._due.set()
        if not self._arrived.is_set():
            self._arrived.set()
        return True

    def close(self) -> None:
        """Deliver the queued items and end the thread. Waits only seconds: delivery may hang."""
        self._closing.set()
        self._due.set()
        self._arrived.set()
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._arrived.wait(self._wake_s)
            self._due.wait(self._gather_s)
            self._arrived.clear()
            self._due.clear()
            is_last = self._closing.is_set()  # read last: `close` sets it first
            with self._lock:
                taken = list(self._waiting)
                self._waiting.clear()
                self._waiting_bytes = 0
            if not self._deliver(taken) and not is_last:
                self._closing.wait(self._retry_s)
        self._end()


class LineLog(Generic[Item]):
    """Writes items as lines to a folder of segment files, on a thread.

    `encode` makes lines of an item. `count` receives the number of lines by outcome: logged,
    dropped or failed. Log messages name the items `what`. Segments older than `max_age_s` seconds
    are removed.
    """

    def __init__(
        self,
        what: str,
        writer: SegmentWriter,
        encode: Callable[[Item], bytes],
        count: Count,
        max_items: int,
        max_bytes: float = float("inf"),
        retry_s: float = 1.0,
        max_age_s: float | None = None,
        gather_s: float = _GATHER_S,
    ) -> None:
        self._what, self._writer, self._encode, self._count = what, writer, encode, count
        self._tidy_s = min(_TIDY_S, max_age_s / 100) if max_age_s else None
        self._tidied = time.monotonic()
        self._is_failing = False
        name = f"slipway-{what.replace(' ', '-')}"
        self._queue: BackgroundQueue[Item] = BackgroundQueue(
            name, self._write, max_items, max_bytes, retry_s, self._tidy_s, gather_s, writer.close
        )

    def put(self, item: Item, num_bytes: int = 0, num_lines: int = 1) -> None:
        """Log an item, or count its lines as dropped. Never waits, never raises."""
        if not self._queue.put(item, num_bytes):
            self._count("dropped", num_lines)

    def close(self) -> None:
        """Write the queued items. Waits only seconds, because the disk may hang."""
        self._queue.close()

    def _write(self, taken: list[Item]) -> bool:
        try:
            for chunk in self._chunks(taken):
                self._append(chunk)
            if self._tidy_s is not None and time.monotonic() - self._tidied >= self._tidy_s:
                self._tidied = time.monotonic()
                self._writer.tidy()
        except Exception as error:
            self._report_failure(error)
        return not self._is_failing

    def _chunks(self, taken: list[Item]) -> Iterator[list[bytes]]:
        """Yield lists of lines to write at once.

        Count lines too large for a segment, and bad items.
        """
        max_bytes = min(_CHUNK_BYTES, self._writer.segment_bytes // 4)
        chunk: list[bytes] = []
        num_bytes = 0
        for item in taken:
            line = self._line(item)
            if line is None:
                continue
            if chunk and num_bytes + len(line) > max_bytes:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(line)
            num_bytes += len(line)
        if chunk:
            yield chunk

    def _line(self, item: Item) -> bytes | None:
        try:
            line = self._encode(item)
        except Exception as error:
            self._count("failed", 1)
            self._report_failure(error)
            return None
        if len(line) > self._writer.segment_bytes:
            self._count("dropped", line.count(b"\n"))
            return None
        return line

    def _append(self, chunk: list[bytes]) -> None:
        lines = b"".join(chunk)
        num_lines = lines.count(b"\n")
        try:
            self._writer.append(lines)
        except Exception as error:
            self._count("failed", num_lines)
            self._report_failure(error)
        else:
            self._count("logged", num_lines)
            if self._is_failing:
                logger.info("writing the %s works again in %s", self._what, self._writer.root)
            self._is_failing = False

    def _report_failure(self, error: Exception) -> None:
        if not self._is_failing:
            reason = disk_fault(error) or repr(error)
            logger.error("cannot write the %s in %s: %s", self._what, self._writer.root, reason)
        self._is_failing = True
