"""Logs refused requests, at a limited rate so that callers cannot fill the disk."""

import asyncio
import logging

from slipway.serving.http.responses import Refusal

MAX_LINES_PER_S = 5  # lines that one worker writes

logger = logging.getLogger("bentoml.slipway")
Peer = tuple[str, int] | None  # address and port; None: unknown


class RefusalLog:
    """Logs refusals with caller and reason, at most MAX_LINES_PER_S per second.

    The refusals beyond this limit are only counted, in one further line.
    """

    def __init__(self) -> None:
        self._num = 0  # refusals in the present second

    def add(self, refusal: Refusal, request_id: str, peer: Peer, detail: str) -> None:
        """Log a refusal. Call it on the event loop only."""
        if not self._num:
            asyncio.get_running_loop().call_later(1.0, self._end_second)
        self._num += 1
        if self._num <= MAX_LINES_PER_S:
            caller = ":".join(map(str, peer)) if peer else "unknown caller"
            reason = f"{refusal.code} ({refusal.status}), {detail}"
            line = f"{caller}, request {request_id}: {reason}"
            logger.warning("refused %s", ascii(line[:400])[1:-1])  # no line breaks of callers

    def _end_second(self) -> None:
        num_more, self._num = self._num - MAX_LINES_PER_S, 0
        if num_more > 0:
            logger.warning(
                "refused %d more requests in this second; slipway_errors_total counts them",
                num_more,
            )
