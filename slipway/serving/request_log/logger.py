"""Logs requests and answers beside the request path: a bounded queue and a thread that writes.

Off unless SLIPWAY_REQUEST_LOG_DIRECTORY is set. Logging never costs a request its answer. If the
queue is full, a request is dropped; if the disk refuses, it has failed; both are counted. A killed
worker loses the requests in its queue, at most a tenth of a second's.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

from pydantic import Field

from slipway.serving.models.observers import Answered, Noted, id_of
from slipway.serving.settings import OptionalPath, SettingsSection
from slipway.system.disk_faults import disk_fault
from slipway.traffic.request_log import (
    REPLAYED,
    LoggedRequest,
    RequestLogWriter,
    digest_inputs,
    encode_line,
)

logger = logging.getLogger("bentoml.slipway")

MAX_WAITING = 4096  # requests
MAX_WAITING_BYTES = 64 << 20  # of their payloads and inputs
_GATHER_S = 0.1  # requests of this time are written together
_RETRY_S = 1.0  # after a failure
_TIDY_S = 600.0  # longest interval with an age limit
_CHUNK_BYTES = 1 << 20  # written at once
_CLOSE_S = 5.0  # that the end of a worker waits for its disk
_DAY_S = 86400.0

Count = Callable[[str, int], None]  # outcome, number of requests


class RequestLogSettings(SettingsSection):
    """Folder, sampling rate and retention of the request log."""

    request_log_directory: OptionalPath = None  # unset or empty: no request is logged
    request_log_sampling_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    request_log_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30  # of the folder, all workers
    request_log_days: Annotated[float, Field(ge=0, le=36500)] = 0.0  # 0: until the folder is full


class RequestLogger:
    """One worker's queue and thread. `count` gets each outcome: logged, dropped or failed."""

    def __init__(
        self,
        writer: RequestLogWriter,
        sampling_rate: float,
        count: Count,
        tidy_s: float | None = None,
    ) -> None:
        self._writer = writer
        self._sampling_rate = sampling_rate
        self._count = count
        self._tidy_s = tidy_s
        self._lock = threading.Lock()
        self._waiting: deque[tuple[float, Answered]] = deque()  # with the time, seconds since 1970
        self._waiting_bytes = 0
        self._arrived, self._closing = threading.Event(), threading.Event()
        self._is_failing = False
        self._tidied = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="slipway-request-log", daemon=True)
        self._thread.start()

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        """Log the sampled requests. Never waits, never raises."""
        for one in answered:
            request_id = id_of(one)
            if not request_id.startswith(REPLAYED) and is_sampled(request_id, self._sampling_rate):
                self._enqueue(moment, Answered._make(one))

    def close(self) -> None:
        """Write what waits and end the thread; do not wait for a disk that hangs."""
        self._closing.set()
        self._arrived.set()
        self._thread.join(_CLOSE_S)

    def _enqueue(self, moment: float, answered: Answered) -> None:
        num_bytes = answered.payload.num_bytes + answered.inputs.nbytes
        with self._lock:
            is_full = (
                len(self._waiting) >= MAX_WAITING
                or self._waiting_bytes + num_bytes > MAX_WAITING_BYTES
            )
            if not is_full:
                self._waiting.append((moment, answered))
                self._waiting_bytes += num_bytes
        if is_full:
            self._count("dropped", 1)
        elif not self._arrived.is_set():
            self._arrived.set()

    def _work(self) -> None:
        while True:
            self._arrived.wait(self._tidy_s)
            is_last = self._closing.wait(_GATHER_S)
            self._arrived.clear()
            try:
                for chunk in self._chunks(self._take()):
                    self._append(chunk)
                self._tidy()
            except Exception as error:
                self._report_failure(error)
            if is_last:
                break
            if self._is_failing:
                self._closing.wait(_RETRY_S)
        self._writer.close()

    def _tidy(self) -> None:
        if self._tidy_s is not None and time.monotonic() - self._tidied >= self._tidy_s:
            self._tidied = time.monotonic()
            self._writer.tidy()

    def _take(self) -> list[tuple[float, Answered]]:
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
        return taken

    def _chunks(self, taken: list[tuple[float, Answered]]) -> Iterator[list[bytes]]:
        """Yield lines to write at once; count those too large for a segment or not encodable."""
        max_bytes = min(_CHUNK_BYTES, self._writer.segment_bytes // 4)
        chunk: list[bytes] = []
        num_bytes = 0
        for moment, answered in taken:
            line = self._encode(moment, answered)
            if line is None:
                continue
            if chunk and num_bytes + len(line) > max_bytes:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(line)
            num_bytes += len(line)
        if chunk:
            yield chunk

    def _encode(self, moment: float, answered: Answered) -> bytes | None:
        try:
            line = encode_line(_logged_request(moment, answered))
        except Exception as error:
            self._count("failed", 1)
            self._report_failure(error)
            return None
        if len(line) > self._writer.segment_bytes:
            self._count("dropped", 1)
            return None
        return line

    def _append(self, chunk: list[bytes]) -> None:
        try:
            self._writer.append(b"".join(chunk))
        except Exception as error:
            self._count("failed", len(chunk))
            self._report_failure(error)
        else:
            self._count("logged", len(chunk))
            if self._is_failing:
                logger.info("requests are logged again in %s", self._writer.root)
            self._is_failing = False

    def _report_failure(self, error: Exception) -> None:
        if not self._is_failing:
            reason = disk_fault(error) or repr(error)
            logger.error("cannot log requests in %s: %s", self._writer.root, reason)
        self._is_failing = True


def open_request_logger(
    settings: RequestLogSettings, num_workers: int, count: Count
) -> RequestLogger | None:
    """Open the request log; None, with a warning for idle settings, if it has no folder."""
    if settings.request_log_directory is None:
        idle = sorted(
            f"SLIPWAY_{name.upper()}"
            for name in settings.model_fields_set - {"request_log_directory"}
        )
        if idle:
            logger.warning(
                "no request is logged: %s without SLIPWAY_REQUEST_LOG_DIRECTORY", ", ".join(idle)
            )
        return None
    max_age_s = settings.request_log_days * _DAY_S or None
    writer = RequestLogWriter(
        settings.request_log_directory, settings.request_log_bytes, num_workers, max_age_s
    )
    logger.info(
        "logging %g %% of the requests in %s, at most %d bytes%s",
        100 * settings.request_log_sampling_rate,
        writer.root,
        settings.request_log_bytes,
        f", for {settings.request_log_days:g} days" if max_age_s else "",
    )
    tidy_s = min(_TIDY_S, max_age_s / 100) if max_age_s else None
    return RequestLogger(writer, settings.request_log_sampling_rate, count, tidy_s)


def is_sampled(request_id: str, sampling_rate: float) -> bool:
    """Return True for the sampled ids: a pure function of the id, the same in all workers."""
    if sampling_rate >= 1:
        return True
    drawn = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8])
    return drawn < sampling_rate * 2**64


def _logged_request(moment: float, answered: Answered) -> LoggedRequest:
    content_type, payload = answered.payload.as_request()
    return LoggedRequest(
        request_id=answered.request_id,
        time=datetime.fromtimestamp(moment, UTC),
        bundle_digest=answered.bundle_digest,
        execution=answered.execution,
        content_type=content_type,
        payload=payload,
        is_list=answered.is_list,
        inputs_sha256=digest_inputs(answered.inputs),
        outputs=answered.outputs,
        answers=answered.answers,
    )
