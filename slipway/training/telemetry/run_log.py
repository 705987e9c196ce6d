"""`.work/log/train.jsonl`: what trainings did, one JSON object per line, appended by every process and kept for good.

    {"time": "2026-11-20T20:45:00.123Z", "run": "5f0c1a2b3c4d", "attempt": 2, "rank": 0, "pid": 4711, "event": "step", "step": 40, ...}

`run` is the name of the training's fingerprint, with which the digest `fingerprint` in model.json begins: equal trainings have equal
ones, and what is killed and run again counts its attempts. It is null for what is refused before there is a fingerprint.
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
    """Appends events of one process; as a context, also the error that ends it."""

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
        """Refusals are what the user can mend, anything else is a failure."""
        if error is not None:
            self.write(
                "refused" if isinstance(error, SlipwayError) else "failed",
                error=type(error).__name__,
                text=str(error),
            )

    def name_run(self, run: str) -> None:
        """From now on events are of the training `run`."""
        self._run = run
        self._attempt = 1 + sum(
            event["event"] == "started" and event["run"] == run
            for event in read_log(self._path.parent)
        )

    def write(self, event: str, **values: Any) -> None:
        """Append one line, whole or, where the process is killed or the disk is full, cut; `read_log` skips such a one."""
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
    """All whole events in order; none where there is no log."""
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
    """JSON has no NaN: such numbers become text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
