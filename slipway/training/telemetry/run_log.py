"""`.work/log/train.jsonl`: events of all trainings, one JSON object per line, never removed.

    {"time": "2026-11-20T20:45:00.123Z", "run": "5f0c1a2b3c4d", "attempt": 2, "rank": 0,
     "pid": 4711, "event": "step", "step": 40, ...}

Every process appends its events. `run` is the first digits of the training's `fingerprint` in
model.json: equal trainings have equal names, and `attempt` counts their starts. `run` is null for a
training that was refused before it had a fingerprint.
"""

import json
import math
import os
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slipway.system.errors import SlipwayError

RUN_LOG = Path("train.jsonl")


class RunLog:
    """Appends the events of one process to the log; as a context manager, also raised errors."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self._rank = folder / RUN_LOG, rank
        self._run: str | None = None
        self._attempt: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # A user can fix a refusal.
            event = "refused" if isinstance(error, SlipwayError) else "failed"
            self.write(event, error=type(error).__name__, text=str(error))

    def name_run(self, run: str) -> None:
        """Set the name `run` of the training for all later events."""
        self._run = run
        self._attempt = 1 + sum(
            event["event"] == "started" and event["run"] == run
            for event in read_log(self._path.parent)
        )

    def write(self, event: str, **values: Any) -> None:
        """Append one line. A kill or a full disk may truncate it; `read_log` skips such a line."""
        facts = {
            "time": _now(),
            "run": self._run,
            "attempt": self._attempt,
            "rank": self._rank,
            "pid": os.getpid(),
            "event": event,
        }
        line = json.dumps({**facts, **_finite(values)}, allow_nan=False, ensure_ascii=False) + "\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return all complete events in order, or an empty list if there is no log."""
    try:
        lines = (folder / RUN_LOG).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [event for event in map(_parsed, lines) if event]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"event", "run"} <= event.keys() else None


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON lacks, by text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
