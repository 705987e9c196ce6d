"""Logs requests and their predictions, outside the request path.

Off unless SLIPWAY_REQUEST_LOG_DIRECTORY is set. A request is dropped if the queue is full, and
failed if the disk refuses it; both are counted.
"""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from pydantic import Field

from slipway.serving.http.routes import sample_number
from slipway.serving.models.observers import Answered, Noted, id_of
from slipway.serving.process.background import Count, LineLog
from slipway.serving.settings import OptionalPath, SettingsSection
from slipway.traffic.request_log import (
    REPLAYED,
    LoggedRequest,
    SegmentWriter,
    digest_inputs,
    encode_line,
)

logger = logging.getLogger("bentoml.slipway")

MAX_WAITING = 4096  # most requests in the queue
MAX_WAITING_BYTES = 64 << 20  # most bytes of their payloads and inputs
_RETRY_S = 1.0  # pause after a failure
_DAY_S = 86400.0


class RequestLogSettings(SettingsSection):
    """Folder, sampling rate and retention of the request log."""

    request_log_directory: OptionalPath = None  # unset or empty: no request is logged
    request_log_sampling_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    request_log_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30  # folder size, over all workers
    request_log_days: Annotated[float, Field(ge=0, le=36500)] = 0.0  # 0: until the folder is full


class RequestLogger:
    """Writes one worker's request log.

    `count` receives the number of requests by outcome: logged, dropped or failed.
    """

    def __init__(
        self,
        writer: SegmentWriter,
        sampling_rate: float,
        count: Count,
        max_age_s: float | None = None,
    ) -> None:
        self._sampling_rate = sampling_rate
        self._log: LineLog[tuple[float, Answered]] = LineLog(  # with times in seconds since 1970
            "request log",
            writer,
            lambda item: encode_line(_logged_request(*item)),
            count,
            MAX_WAITING,
            MAX_WAITING_BYTES,
            _RETRY_S,
            max_age_s,
        )

    def offer(self, answered: Sequence[Noted], moment: float) -> None:
        """Queue the sampled requests. Never waits, never raises."""
        for one in answered:
            request_id = id_of(one)
            is_own = not request_id.startswith(REPLAYED)
            if is_own and sample_number(request_id) < self._sampling_rate:
                full = Answered._make(one)
                self._log.put((moment, full), full.payload.num_bytes + full.inputs.nbytes)

    def close(self) -> None:
        """Write the queued requests and end the thread. Does not wait for a disk that hangs."""
        self._log.close()


def open_request_logger(
    settings: RequestLogSettings, num_workers: int, count: Count
) -> RequestLogger | None:
    """Open the request log. Returns None if no folder is set.

    Settings that have no effect without a folder then cause a warning.
    """
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
    writer = SegmentWriter(
        settings.request_log_directory, settings.request_log_bytes, num_workers, max_age_s
    )
    logger.info(
        "logging %g %% of the requests in %s, at most %d bytes%s",
        100 * settings.request_log_sampling_rate,
        writer.root,
        settings.request_log_bytes,
        f", for {settings.request_log_days:g} days" if max_age_s else "",
    )
    return RequestLogger(writer, settings.request_log_sampling_rate, count, max_age_s)


def _logged_request(moment: float, answered: Answered) -> LoggedRequest:
    content_type, payload = answered.payload.as_request()
    return LoggedRequest(
        request_id=answered.request_id,
        time=datetime.fromtimestamp(moment, UTC),
        bundle_digest=answered.bundle_digest,
        execution=answered.execution,
        content_type=content_type,
        payload=answered.bundle.manifest.input.redacted(payload),
        is_list=answered.is_list,
        inputs_sha256=digest_inputs(answered.inputs),
        outputs=answered.outputs,
        answers=answered.answers,
    )
