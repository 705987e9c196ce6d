"""Repeats an exchange with SLIPWAY_DATABASE_URL on a thread, less often while it fails."""

import logging
import threading
from collections.abc import Callable

from slipway.system.errors import LockedError

logger = logging.getLogger("bentoml.slipway")

_ROUND_S = 1.0  # pause between two rounds
_MAX_WAIT_S = 30.0  # longest pause after failures
_CLOSE_S = 5.0  # longest time that the end of a worker waits for its last round


class Rounds:
    """A thread that calls `exchange` every second, a last time while it closes, and then `end`.

    A round that raises LockedError is left to another worker. Any other error is a failed round:
    `report_fault` counts it, the first in a row is logged as `failing`, and the pauses double. The
    first round that succeeds again is logged as `working`.
    """

    def __init__(
        self,
        name: str,
        exchange: Callable[[], None],
        report_fault: Callable[[], None],
        end: Callable[[], None],
        *,
        failing: str,
        working: str,
    ) -> None:
        self._exchange, self._report_fault, self._end = exchange, report_fault, end
        self._failing, self._working = failing, working
        self._failures = 0  # failed rounds in a row
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Run the last round and end the thread. Does not wait for a database that hangs."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(pause_s(self._failures))
            try:
                self._exchange()
            except LockedError:
                continue  # another worker holds the lock
            except Exception as error:  # errors of psycopg, of SQLite or of the disk
                self._failures += 1
                self._report_fault()
                if self._failures == 1:
                    logger.error("%s: %s: %s", self._failing, type(error).__name__, error)
            else:
                if self._failures:
                    logger.info(self._working)
                self._failures = 0
        self._end()


def pause_s(failures: int) -> float:
    """Return the seconds before the next round, after a number of failed rounds in a row."""
    return min(_MAX_WAIT_S, _ROUND_S * 2.0 ** min(failures, 9))
