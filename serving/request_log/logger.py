"""Keeps requests and their answers beside the request path: a bounded queue, and a thread that writes it to disk.

Off unless SLIPWAY_KEEP_DIRECTORY is set. Keeping never costs a request its answer: where the queue is full a request is dropped,
where the disk refuses it has failed, and both are counted. What is waiting, at most a tenth of a second's, is lost with a killed worker.
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

from serving.models.observers import Answered, Noted, id_of
from serving.settings import OptionalPath, SettingsSection
from slipway.system.disk_faults import disk_fault
from slipway.traffic.request_log import (
    REPLAYED,
    LoggedRequest,
    RequestLogWriter,
    digest_inputs,
    encode_line,
)

logger = logging.getLogger("bentoml.slipway")

OUTCOMES = ("kept", "dropped", "failed")
MAX_WAITING = 4096  # requests
MAX_WAITING_BYTES = 64 << 20  # of their payloads and inputs
_GATHER_S = 0.1  # requests of this time are written together
_RETRY_S = 1.0  # after a failure
_TIDY_S = 600.0  # with an age limit, at the latest
_CHUNK_BYTES = 1 << 20  # written at once
_CLOSE_S = 5.0  # most that the end of a worker waits for its disk
_DAY_S = 86400.0

Count = Callable[[str, int], None]


class RequestLogSettings(SettingsSection):
    """The folder of the request log, its sampling rate and its retention."""

    keep_directory: OptionalPath = None  # unset or empty: no request is logged
    keep_share: Annotated[float, Field(ge=0, le=1)] = 1.0  # sampling rate
    keep_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30  # of the folder, over all workers
    keep_days: Annotated[float, Field(ge=0, le=36500)] = 0.0  # 0: until the folder is full


class Keeper:
    """One worker's queue and thread. `count` is told what became of how many requests, by one of OUTCOMES."""

    def __init__(
        self, folder: RequestLogWriter, share: float, count: Count, tidy_s: float | None = None
    ) -> None:
        self._folder = folder
        self._share = share
        self._count = count
        self._tidy_s = tidy_s
        self._lock = threading.Lock()
        self._waiting: deque[tuple[float, Answered]] = deque()  # with the time, seconds since 1970
        self._waiting_bytes = 0
        self._arrived, self._closing = threading.Event(), threading.Event()
        self._is_failing = False
        self._tidied = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="slipway-keep", daemon=True)
        self._thread.start()

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        """Keep those that are among the sampled ones. Never waits, never raises."""
        for one in answered:
            request_id = id_of(one)
            if not request_id.startswith(REPLAYED) and is_sampled(request_id, self._share):
                self._keep(moment, Answered._make(one))

    def _keep(self, moment: float, answered: Answered) -> None:
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

    def close(self) -> None:
        """Write what waits, and end the thread; a disk that hangs is left behind."""
        self._closing.set()
        self._arrived.set()
        self._thread.join(_CLOSE_S)

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
                self._failed(error)
            if is_last:
                break
            if self._is_failing:
                self._closing.wait(_RETRY_S)
        self._folder.close()

    def _tidy(self) -> None:
        if self._tidy_s is not None and time.monotonic() - self._tidied >= self._tidy_s:
            self._tidied = time.monotonic()
            self._folder.tidy()

    def _take(self) -> list[tuple[float, Answered]]:
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
            self._waiting_bytes = 0
        return taken

    def _chunks(self, taken: list[tuple[float, Answered]]) -> Iterator[list[bytes]]:
        """Lines that are written at once; what is too large for any segment, or cannot be written down, is counted here."""
        most = min(_CHUNK_BYTES, self._folder.segment_bytes // 4)
        chunk: list[bytes] = []
        num_bytes = 0
        for moment, answered in taken:
            line = self._line(moment, answered)
            if line is None:
                continue
            if chunk and num_bytes + len(line) > most:
                yield chunk
                chunk, num_bytes = [], 0
            chunk.append(line)
            num_bytes += len(line)
        if chunk:
            yield chunk

    def _line(self, moment: float, answered: Answered) -> bytes | None:
        try:
            line = encode_line(_kept(moment, answered))
        except Exception as error:
            self._count("failed", 1)
            self._failed(error)
            return None
        if len(line) > self._folder.segment_bytes:
            self._count("dropped", 1)
            return None
        return line

    def _append(self, chunk: list[bytes]) -> None:
        try:
            self._folder.append(b"".join(chunk))
        except Exception as error:
            self._count("failed", len(chunk))
            self._failed(error)
        else:
            self._count("kept", len(chunk))
            if self._is_failing:
                logger.info("requests are kept again in %s", self._folder.root)
            self._is_failing = False

    def _failed(self, error: Exception) -> None:
        if not self._is_failing:
            logger.error(
                "requests are not kept in %s: %s",
                self._folder.root,
                disk_fault(error) or repr(error),
            )
        self._is_failing = True


def open_keeper(settings: RequestLogSettings, num_workers: int, count: Count) -> Keeper | None:
    """The keeper that the settings ask for; None where nothing is kept."""
    if settings.keep_directory is None:
        idle = sorted(
            f"SLIPWAY_{name.upper()}"
            for name in settings.model_fields_set & {"keep_share", "keep_bytes", "keep_days"}
        )
        if idle:
            logger.warning("nothing is kept: %s without SLIPWAY_KEEP_DIRECTORY", ", ".join(idle))
        return None
    max_age_s = settings.keep_days * _DAY_S or None
    folder = RequestLogWriter(settings.keep_directory, settings.keep_bytes, num_workers, max_age_s)
    limit = f", for {settings.keep_days:g} days" if max_age_s else ""
    logger.info(
        "%g %% of the requests are kept in %s, at most %d bytes%s",
        100 * settings.keep_share,
        folder.root,
        settings.keep_bytes,
        limit,
    )
    return Keeper(
        folder, settings.keep_share, count, min(_TIDY_S, max_age_s / 100) if max_age_s else None
    )


def is_sampled(request_id: str, share: float) -> bool:
    """Whether a request belongs to the sample; a pure function of its id, so that all workers agree."""
    if share >= 1:
        return True
    drawn = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8])
    return drawn < share * 2**64


def _kept(moment: float, answered: Answered) -> LoggedRequest:
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
