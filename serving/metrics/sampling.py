"""One thread of a worker that reads gauges every few seconds, beside the request path.

Whatever a source raises is counted and logged once, and the next sample is tried as ever: watching never ends, and never hurts what
it watches.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

logger = logging.getLogger("bentoml.slipway")

SECONDS = 5.0  # a third of Prometheus' usual scrape interval: no scrape shows a figure twice as old as the one before


class MetricsSource(Protocol):
    """Something whose figures are read now and then."""

    def sample(self) -> None:
        """Read them once; takes milliseconds."""


class Sampler:
    """Samples `sources` until it is closed. `failed` is told of each sample that raised."""

    def __init__(
        self, sources: Sequence[MetricsSource], failed: Callable[[], None], seconds: float = SECONDS
    ) -> None:
        self._sources = sources
        self._failed = failed
        self._seconds = seconds
        self._ended = threading.Event()
        self._logged: set[int] = set()  # positions of sources whose failure the log has
        self._thread = threading.Thread(target=self._run, name="slipway-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; returns within a second even where a driver hangs, and then leaves it to end with the process."""
        self._ended.set()
        self._thread.join(1)

    def _run(self) -> None:
        while True:
            for position, source in enumerate(self._sources):
                self._sample(position, source)
            if self._ended.wait(self._seconds):
                return

    def _sample(self, position: int, source: MetricsSource) -> None:
        try:
            source.sample()
            self._logged.discard(position)
        except Exception:
            self._failed()
            if position not in self._logged:
                logger.exception("%s could not be sampled", type(source).__name__)
            self._logged.add(position)
