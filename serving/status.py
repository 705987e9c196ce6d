"""`GET /status`: how the service fares, in one object: what the page at `/` shows.

Each extension adds its parts; a part that is switched off is null.
However many look, the parts are asked at most once a second, beside the event loop.
"""

import asyncio
import logging
from collections.abc import Collection
from time import monotonic
from typing import Any

from serving.extension import StatusPart
from serving.http.server_paths import without_server_paths
from serving.worker import ModelWorker

logger = logging.getLogger("bentoml.slipway")

_KEPT_S = 1.0


class Status:
    """The last status and its age. `asking` are the routes that count as traffic."""

    def __init__(self, worker: ModelWorker, asking: Collection[str]) -> None:
        self._worker = worker
        self._asking = asking
        self._content: dict[str, Any] = {}
        self._at = -_KEPT_S
        self._reading = asyncio.Lock()

    async def read(self) -> dict[str, Any]:
        """The status, at most a second old; those who ask at the same time wait for the same one."""
        async with self._reading:
            if monotonic() - self._at >= _KEPT_S:
                self._content = await asyncio.to_thread(self._compose)
                self._at = monotonic()
            return self._content

    def _compose(self) -> dict[str, Any]:
        model = self._worker.model
        about = (
            {"version": model.version, "task": model.bundle.manifest.task}
            if model
            else {"version": None, "task": None}
        )
        return {
            "model": {
                "ready": model is not None,
                "reason": None if model else self._worker.reason,
            }
            | about,
            "traffic": self._worker.metrics.summary(self._asking),
            **{
                name: self._read_part(name, read)
                for hooks in self._worker.hooks.values()
                for name, read in hooks.status.items()
            },
        }

    def _read_part(self, name: str, read: StatusPart) -> dict[str, Any] | None:
        try:
            return without_server_paths(read(), self._worker.settings)  # type: ignore[no-any-return]
        except Exception:  # a part that fails must not take the others with it
            logger.exception("the status of %s cannot be read", name)
            return {"failed": True}
