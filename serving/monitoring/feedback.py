"""The truths that callers tell: read strictly, written down on a thread of their own, joined to what was predicted.

A truth that comes before its prediction was written (another worker may hold it still) waits for it, for an hour. Told again, the last one
counts. Unlike the watching, telling is a request of its own: where it cannot be written down the caller is told so.
"""

import asyncio
import json
import logging
import math
import re
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serving.http.responses import RETRY_AFTER, Refusal
from serving.http.strict_json import may_exceed, parse
from serving.monitoring.metrics import WatchingMetrics
from serving.monitoring.settings import MonitoringSettings
from serving.monitoring.store import Heard, ItemNeededError, Store, Told
from serving.settings import Settings
from slipway.artifacts.bundle import Bundle

logger = logging.getLogger("bentoml.slipway")

MAX_TRUTHS = 1000  # in one request
MAX_WAITING = 32  # requests, of MAX_TRUTHS each at most
_MAX_VALUES = 6 * MAX_TRUTHS + 16  # brackets, commas and texts of so many truths
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEYS = ("request_id", "item", "truth")
_EXAMPLE = '{"request_id": "9b2f6c1d8e7a4053", "truth": ...}'
_MOST_SHOWN = 8
ACCEPTED_TRUTHS = (
    f'send {_EXAMPLE}, or {{"feedback": [...]}} with several, with content type application/json'
)


class Feedback:
    """One worker's way of taking truths."""

    def __init__(
        self,
        settings: Settings,
        metrics: WatchingMetrics,
        wrong: Callable[[str], None] = lambda model: None,
    ) -> None:
        """`wrong` is told, on a thread, the version of each model whose label turned out to be wrong."""
        self._wrong = wrong
        self._store = Store(settings.state, settings.section(MonitoringSettings).limits)
        self._max_items = max(settings.max_rows, settings.max_items)  # of a table, of images
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipway-feedback")
        self._num_waiting = 0

    async def tell(self, body: bytes, manifest: Bundle) -> tuple[int, dict[str, Any]]:
        """Status and answer to the JSON text of a request; Refusal if it is not right, or cannot be written down."""
        try:
            truths, is_list = read_ground_truths(body, manifest, self._max_items)
        except Refusal:
            self._metrics.feedback("invalid")
            raise
        if self._num_waiting >= MAX_WAITING:
            message = f"{self._num_waiting} requests with feedback are waiting, the limit; try again in {RETRY_AFTER[1]} s"
            raise Refusal("feedback_full", message, headers=(RETRY_AFTER,))
        self._num_waiting += 1
        try:
            heard = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._write, truths
            )
        except ItemNeededError as error:
            self._metrics.feedback("invalid")
            message = f"the request had {error.num_items} items: say with `item`, counted from 0, whose truth this is"
            raise Refusal(
                "missing_field", message, field=_place(is_list, error.position, "item")
            ) from None
        finally:
            self._num_waiting -= 1
        answers = [{"joined": one.joined, "duplicate": one.duplicate} for one in heard]
        status = 200 if all(one.joined for one in heard) else 202
        return status, {"feedback": answers} if is_list else dict(answers[0])

    def close(self) -> None:
        """End the thread."""
        self._thread.submit(self._store.close)
        self._thread.shutdown()

    def _write(self, truths: list[Told]) -> list[Heard]:
        try:
            heard = self._store.tell(truths)
        except (sqlite3.Error, OSError) as error:
            self._metrics.fault("feedback")
            logger.error("feedback could not be written down: %s: %s", type(error).__name__, error)
            message = "feedback cannot be written down at present, the log of the service has the details; send it again later"
            raise Refusal("feedback_unavailable", message, headers=(RETRY_AFTER,)) from None
        for one in heard:
            if one.duplicate:
                self._metrics.feedback("duplicate")
            elif one.joined:
                self._metrics.feedback("joined")
                if one.is_wrong and one.model:
                    self._wrong(one.model)
        return heard


def read_ground_truths(body: bytes, manifest: Bundle, max_items: int) -> tuple[list[Told], bool]:
    """The truths of a JSON text, and whether they came in a list; Refusal naming the first fault by its place."""
    if may_exceed(body, _MAX_VALUES):
        raise Refusal(
            "too_many_rows",
            f"the body has more values than {MAX_TRUTHS} truths can have; send fewer in each request",
        )
    content = parse(body)
    if not isinstance(content, dict):
        raise Refusal(
            "not_a_row",
            f'expected one JSON object as {_EXAMPLE}, or {{"feedback": [...]}} with several',
        )
    if list(content) != ["feedback"]:
        return [_read(content, manifest, max_items, is_list=False, position=0)], False
    listed = content["feedback"]
    if not isinstance(listed, list):
        raise Refusal(
            "type_violation",
            f"`feedback` is no list, expected a list of objects as {_EXAMPLE}",
            field="feedback",
        )
    if not listed:
        raise Refusal(
            "no_rows", "the list of truths is empty, expected at least one", field="feedback"
        )
    if len(listed) > MAX_TRUTHS:
        raise Refusal(
            "too_many_rows",
            f"there are {len(listed)} truths in one request, the limit is {MAX_TRUTHS}",
            field="feedback",
        )
    return [
        _read(one, manifest, max_items, is_list=True, position=position)
        for position, one in enumerate(listed)
    ], True


def _read(content: Any, manifest: Bundle, max_items: int, *, is_list: bool, position: int) -> Told:
    def refuse(code: str, name: str, message: str) -> Refusal:
        place = _place(is_list, position, name)
        return Refusal(code, f"{place}: {message}", field=place)

    if not isinstance(content, dict):
        place = f"feedback[{position}]"
        raise Refusal("not_a_row", f"{place} is no object, expected {_EXAMPLE}", field=place)
    for name in content:
        if name not in _KEYS:
            raise refuse(
                "unknown_field", name[:80], f"there is no such key, expected {', '.join(_KEYS)}"
            )
    for name in ("request_id", "truth"):
        if content.get(name) is None:
            raise refuse("missing_field", name, f"it is missing, expected {_EXAMPLE}")
    request_id, item = content["request_id"], content.get("item")
    if not isinstance(request_id, str) or not _SANE_ID.fullmatch(request_id):
        raise refuse(
            "type_violation",
            "request_id",
            f"found {_shown(request_id)}, expected the request_id of an answer",
        )
    if item is not None and (not isinstance(item, int) or isinstance(item, bool)):
        raise refuse(
            "type_violation",
            "item",
            f"found {_shown(item)}, expected a position in the request, counted from 0",
        )
    if item is not None and not 0 <= item < max_items:
        raise refuse(
            "out_of_range", "item", f"found {item}, expected a position from 0 to {max_items - 1}"
        )
    label, value = _truth(
        content["truth"], manifest, lambda code, message: refuse(code, "truth", message)
    )
    return Told(request_id, item, label, value)


def _truth(
    truth: Any, manifest: Bundle, refuse: Callable[[str, str], Refusal]
) -> tuple[str | None, float | None]:
    """A label of the bundle, or a number, whichever the model predicts."""
    if manifest.output.kind == "value":
        if (
            isinstance(truth, bool)
            or not isinstance(truth, int | float)
            or not math.isfinite(truth)
        ):
            raise refuse(
                "type_violation",
                f"found {_shown(truth)}, expected a number: this model predicts numbers",
            )
        return None, float(truth)
    labels = manifest.output.labels
    shown = ", ".join(labels[:_MOST_SHOWN]) + ", ..." * (len(labels) > _MOST_SHOWN)
    if not isinstance(truth, str):
        raise refuse("type_violation", f"found {_shown(truth)}, expected a label as text: {shown}")
    if truth not in labels:
        raise refuse(
            "unknown_label", f"found {truth[:80]!r}, expected one of {len(labels)} labels: {shown}"
        )
    return truth, None


def _shown(value: Any) -> str:
    """As JSON, in which the number 7 is not the text "7"."""
    return json.dumps(value, ensure_ascii=False)[:80]


def _place(is_list: bool, position: int, name: str) -> str:
    return f"feedback[{position}].{name}" if is_list else name
