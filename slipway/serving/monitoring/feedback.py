"""Receives true labels from callers, stores them, and joins them to the stored predictions.

Labels are parsed strictly, and stored on a thread. A label that arrives before its prediction is
stored (another worker may still hold it) waits for an hour. If an item is labelled twice, the last
label counts. If feedback cannot be stored, the caller receives an error.
"""

import asyncio
import json
import logging
import math
import re
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, assert_never

from slipway.artifacts.bundle import Bundle
from slipway.artifacts.label_sets import set_text
from slipway.serving.http.responses import RETRY_AFTER, Refusal
from slipway.serving.http.strict_json import may_exceed, parse
from slipway.serving.monitoring.labels import (
    FeedbackItem,
    FeedbackResult,
    ItemNeededError,
    OutboxFullError,
)
from slipway.serving.monitoring.metrics import MonitoringMetrics
from slipway.serving.monitoring.monitor import GATHER_S, MERGE_S
from slipway.serving.monitoring.settings import MonitoringSettings
from slipway.serving.monitoring.store import Store
from slipway.serving.settings import Settings

logger = logging.getLogger("bentoml.slipway")

MAX_LABELS = 1000  # most labels of one request
MAX_WAITING = 32  # most requests that wait for the thread
# A label may arrive before the workers have stored its prediction. It is joined within this time.
JOINS_WITHIN_S = math.ceil(GATHER_S + MERGE_S)
_MAX_VALUES = 6 * MAX_LABELS + 16  # brackets, commas and strings of MAX_LABELS labels
SANE_ID = "[A-Za-z0-9._-]{1,64}"
_KEYS = ("request_id", "item", "ground_truth")
_EXAMPLE = '{"request_id": "9b2f6c1d8e7a4053", "ground_truth": ...}'
_MAX_SHOWN = 8
ACCEPTED_FEEDBACK = (
    f'send {_EXAMPLE}, or {{"feedback": [...]}} with several, with content type application/json'
)


class FeedbackReceiver:
    """Receives feedback in one worker.

    `recent_items` returns the number of items of each prediction that this worker may not have
    stored yet, by request id. `report_wrong` is called on a thread with the version of each model
    whose prediction a label proved wrong.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: MonitoringMetrics,
        recent_items: Callable[[], Mapping[str, int]],
        report_wrong: Callable[[str], None] = lambda version: None,
    ) -> None:
        self._recent_items = recent_items
        self._report_wrong = report_wrong
        limits = settings.section(MonitoringSettings).limits
        self._store = Store(settings.state, limits)
        self._is_shared = limits.database_url is not None
        self._max_items = max(settings.max_rows, settings.max_items)  # for tables, for images
        self._metrics = metrics
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipway-feedback")
        self._num_waiting = 0

    async def receive(
        self, body: bytes, manifest: Bundle, caller: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Store the labels in a JSON body as those of `caller`; return status and response.

        Raises Refusal if the body is invalid or cannot be stored.
        """
        try:
            items, is_list = read_feedback(body, manifest, self._max_items)
        except Refusal:
            self._metrics.feedback["invalid"].inc()
            raise
        items = [replace(item, caller=caller) for item in items]
        if self._num_waiting >= MAX_WAITING:
            raise Refusal(
                "feedback_full",
                f"{self._num_waiting} requests with feedback are waiting, the limit; "
                f"try again in {RETRY_AFTER[1]} s",
                headers=(RETRY_AFTER,),
            )
        self._num_waiting += 1
        try:
            results = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._store_items, items
            )
        except ItemNeededError as error:
            self._metrics.feedback["invalid"].inc()
            raise Refusal(
                "missing_field",
                f"the request had {error.num_items} items: name the labelled one with `item`, "
                "counted from 0",
                field=_place(is_list, error.position, "item"),
            ) from None
        except OutboxFullError as error:
            raise Refusal(
                "feedback_full",
                f"{error.num_waiting} labels wait for the database of several services, the "
                f"limit; try again in {RETRY_AFTER[1]} s",
                headers=(RETRY_AFTER,),
            ) from None
        finally:
            self._num_waiting -= 1
        is_joined = all(one.joined for one in results)
        recent = {} if is_joined or self._is_shared else self._recent_items()
        answers: list[dict[str, Any]] = []
        for one, item in zip(results, items, strict=True):
            answers.append({"joined": one.joined, "duplicate": one.duplicate})
            if not one.joined and item.belongs_to(recent.get(item.request_id, 0)):
                answers[-1]["joins_within_s"] = JOINS_WITHIN_S
        status = 200 if is_joined else 202
        return status, {"feedback": answers} if is_list else answers[0]

    def close(self) -> None:
        """End the thread that stores labels."""
        self._thread.submit(self._store.close)
        self._thread.shutdown()

    def _store_items(self, items: list[FeedbackItem]) -> list[FeedbackResult]:
        try:
            results = self._store.add_feedback(items)
        except (sqlite3.Error, OSError) as error:
            self._metrics.fault("feedback")
            logger.error("cannot store feedback: %s: %s", type(error).__name__, error)
            raise Refusal(
                "feedback_unavailable",
                "feedback cannot be stored at present; the service's log has the details. "
                "Send it again later",
                headers=(RETRY_AFTER,),
            ) from None
        for result in results:
            if result.duplicate:
                self._metrics.feedback["duplicate"].inc()
            elif result.joined:
                self._metrics.feedback["joined"].inc()
                if result.is_wrong and result.model:
                    self._report_wrong(result.model)
        return results


def read_feedback(body: bytes, manifest: Bundle, max_items: int) -> tuple[list[FeedbackItem], bool]:
    """Parse a JSON body. Returns its labels, and True if they are a list.

    Raises Refusal for the first fault, with its position.
    """
    if may_exceed(body, _MAX_VALUES):
        raise Refusal(
            "too_many_rows",
            f"the body has more values than {MAX_LABELS} labels can have; send fewer per request",
        )
    content = parse(body)
    if not isinstance(content, dict):
        raise Refusal(
            "not_a_row",
            f'expected one JSON object as {_EXAMPLE}, or {{"feedback": [...]}} with several',
        )
    if list(content) != ["feedback"]:
        return [_read_item(content, manifest, max_items, is_list=False, position=0)], False
    listed = content["feedback"]
    if not isinstance(listed, list):
        raise Refusal(
            "type_violation",
            f"`feedback` is not a list, expected a list of objects as {_EXAMPLE}",
            field="feedback",
        )
    if not listed:
        raise Refusal(
            "no_rows", "the list of labels is empty, expected at least one", field="feedback"
        )
    if len(listed) > MAX_LABELS:
        raise Refusal(
            "too_many_rows",
            f"there are {len(listed)} labels in one request, the limit is {MAX_LABELS}",
            field="feedback",
        )
    items = [
        _read_item(one, manifest, max_items, is_list=True, position=position)
        for position, one in enumerate(listed)
    ]
    return items, True


def _read_item(
    content: Any, manifest: Bundle, max_items: int, *, is_list: bool, position: int
) -> FeedbackItem:
    def refuse(code: str, name: str, message: str) -> Refusal:
        place = _place(is_list, position, name)
        return Refusal(code, f"{place}: {message}", field=place)

    if not isinstance(content, dict):
        place = f"feedback[{position}]"
        raise Refusal("not_a_row", f"{place} is not an object, expected {_EXAMPLE}", field=place)
    for name in content:
        if name not in _KEYS:
            raise refuse(
                "unknown_field", name[:80], f"there is no such key, expected {', '.join(_KEYS)}"
            )
    for name in ("request_id", "ground_truth"):
        if content.get(name) is None:
            raise refuse("missing_field", name, f"it is missing, expected {_EXAMPLE}")
    request_id, item = content["request_id"], content.get("item")
    if not isinstance(request_id, str) or not re.fullmatch(SANE_ID, request_id):
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
    label, value = _read_label(
        content["ground_truth"],
        manifest,
        lambda code, message: refuse(code, "ground_truth", message),
    )
    return FeedbackItem(request_id, item, label, value)


def _read_label(
    truth: Any, manifest: Bundle, refuse_truth: Callable[[str, str], Refusal]
) -> tuple[str | None, float | None]:
    """Return the class name or the number that a label states, by the model's task."""
    labels = manifest.output.labels
    shown = ", ".join(labels[:_MAX_SHOWN]) + ", ..." * (len(labels) > _MAX_SHOWN)
    match manifest.output.kind:
        case "value":
            return None, _read_number(truth, refuse_truth)
        case "label_probabilities":
            return _read_labels(truth, labels, shown, refuse_truth), None
        case "probabilities":
            return _read_class(truth, labels, shown, refuse_truth), None
        case kind:
            assert_never(kind)


def _read_number(truth: Any, refuse_truth: Callable[[str, str], Refusal]) -> float:
    is_number = isinstance(truth, int | float) and not isinstance(truth, bool)
    if not is_number or not math.isfinite(truth):
        raise refuse_truth(
            "type_violation",
            f"found {_shown(truth)}, expected a number: this model predicts numbers",
        )
    return float(truth)


def _read_class(
    truth: Any, labels: list[str], shown: str, refuse_truth: Callable[[str, str], Refusal]
) -> str:
    """Return the class name in a label. Raises Refusal for any other value."""
    if not isinstance(truth, str):
        raise refuse_truth(
            "type_violation", f"found {_shown(truth)}, expected a label as text: {shown}"
        )
    if truth not in labels:
        raise refuse_truth(
            "unknown_label", f"found {truth[:80]!r}, expected one of {len(labels)} labels: {shown}"
        )
    return truth


def _read_labels(
    truth: Any, labels: list[str], shown: str, refuse_truth: Callable[[str, str], Refusal]
) -> str:
    """Return a set of class names as text. Raises Refusal for other values."""
    if not isinstance(truth, list) or not all(isinstance(label, str) for label in truth):
        raise refuse_truth(
            "type_violation",
            f"found {_shown(truth)}, expected a list of labels, [] for none: {shown}",
        )
    for label in truth:
        if label not in labels:
            raise refuse_truth(
                "unknown_label",
                f"found {label[:80]!r}, expected some of {len(labels)} labels: {shown}",
            )
    return set_text(truth)


def _shown(value: Any) -> str:
    """Format a value as JSON, so that the number 7 and the text "7" differ."""
    return json.dumps(value, ensure_ascii=False)[:80]


def _place(is_list: bool, position: int, name: str) -> str:
    return f"feedback[{position}].{name}" if is_list else name
