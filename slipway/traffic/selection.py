"""Selects logged requests with known labels as training rows, most informative first.

The score of a row is the sum of four numbers from 0 to 1: the ranks of the prediction's error, its
uncertainty and its OOD score, and 1 if the traffic drifted at the time. The log is read twice, and
only the contents of selected rows are kept in memory, so memory does not grow with the log.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.label_sets import named_label
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.contract import InputContract, listed_rows
from slipway.inputs.multipart import decode_images
from slipway.inputs.texts import TextContract
from slipway.traffic.monitoring_records import EARLY_S, DriftedSpan, GroundTruth
from slipway.traffic.request_log import DamagedLine, LoggedRequest, read_requests

Content = bytes | dict[str, Any]  # an encoded image, or the cells of a row
Key = tuple[str, int, float]  # request id, item, time of the answer


@dataclass(frozen=True)
class LoggedItem:
    """One row of a logged request: its label, prediction and scores, without its content."""

    key: Key
    model: str
    digest: str  # digest of the content
    truth: str | float | None
    predicted: str | float
    doubt: float  # 1 - the probability of the predicted class; 0 for a number
    ood_score: float
    is_ood: bool
    drifted: bool  # True in a window that drifted
    # 1 less the distance between the two largest probabilities; of several labels, the largest of
    # these for a label and its absence. None for a number.
    ambiguity: float | None = None

    @property
    def error(self) -> float:
        """Error of the prediction: 0 or 1 for a class, the absolute error for a number.

        It is 0 if the label is unknown.
        """
        if self.truth is None:
            return 0.0
        if isinstance(self.truth, str) or isinstance(self.predicted, str):
            return float(self.truth != self.predicted)
        return abs(self.truth - self.predicted)


@dataclass
class SelectedRows:
    """The selected rows, most informative first, and the numbers of omitted rows by reason."""

    items: list[LoggedItem]
    contents: dict[Key, Content]
    num_logged: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def collect(
    request_log: Path,
    labels: Iterable[GroundTruth],
    drifted: Sequence[DriftedSpan],
    contract: InputContract,
    classes: Sequence[str],
    *,
    num_rows: int | None = None,
    unlabelled: bool = False,
) -> SelectedRows:
    """Select the `num_rows` most informative labelled rows (None: all).

    `unlabelled` includes rows without a label. `classes` are the possible labels; empty for a
    numeric target.
    """
    collected = SelectedRows([], {})
    has_classes = bool(classes)
    known = {
        (label.request_id, label.item): label
        for label in labels
        if _value_of(label, has_classes) is not None
    }
    found = list(_items(request_log, drifted, contract, has_classes, collected))
    collected.num_logged = len(found)
    labelled = _labelled(found, known, has_classes, collected)
    items = _ranked(_without_copies(labelled, collected))
    wanted = [item for item in items if unlabelled or item.truth is not None]
    others = [] if unlabelled else [item for item in items if item.truth is None]
    collected.left_out.update(
        "after the label of their id" if item.key[:2] in known else "without a label"
        for item in others
    )
    chosen = wanted if num_rows is None else wanted[:num_rows]
    collected.left_out["beyond --rows"] += len(wanted) - len(chosen)
    collected.contents = read_contents(request_log, {item.key for item in chosen}, contract)
    # Leave out rows whose segment was removed since the first pass over the log.
    collected.items = [item for item in chosen if item.key in collected.contents]
    return collected


def unlabelled_items(
    request_log: Path,
    labels: Iterable[GroundTruth],
    contract: InputContract,
    classes: Sequence[str],
) -> list[LoggedItem]:
    """Return the logged rows without a label; of equal contents only one.

    If an id was reused, only the row of its last prediction is returned. An id with any known label
    is left out, because a new label would replace the known one.
    """
    counts = SelectedRows([], {})
    known = {(label.request_id, label.item): label for label in labels}
    found = list(_items(request_log, (), contract, bool(classes), counts))
    items = _without_copies(_labelled(found, known, bool(classes), counts), counts)
    return [item for item in items if item.key[:2] not in known]


def cell_value(value: Any, column: Column) -> float | bool | str | None:
    """Convert a JSON value to a table cell; ValueError if it does not fit the column's kind."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if column.kind == "boolean" and isinstance(value, bool):
        return value
    if column.kind == "number" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if column.kind in ("category", "date") and isinstance(value, str):
        return value.strip()
    raise ValueError(f"{column.name}: {value!r} is not a {column.kind}")


def _items(
    request_log: Path,
    drifted: Sequence[DriftedSpan],
    contract: InputContract,
    has_classes: bool,
    collected: SelectedRows,
) -> Iterator[LoggedItem]:
    """Yield every logged row, without its label. Counts unusable rows in `collected`."""
    for request in read_requests(request_log):
        if isinstance(request, DamagedLine):
            collected.left_out["in a damaged line"] += 1
            continue
        moment = request.time.timestamp()
        in_drift = any(
            span.model == request.model_version and span.opened <= moment <= span.closed
            for span in drifted
        )
        try:
            contents = request_contents(request, contract)
        except ValueError:
            collected.left_out["of another model"] += request.num_rows
            continue
        for item, content in contents.items():
            answer = request.answers[item]
            predicted = named_label(answer) if has_classes else answer.get("value")
            if predicted is None:
                collected.left_out["of another model"] += 1
                continue
            yield LoggedItem(
                key=(request.request_id, item, moment),
                model=request.model_version,
                digest=content_digest(content),
                truth=None,
                predicted=predicted,
                doubt=_doubt(answer) if has_classes else 0.0,
                ood_score=float(answer["ood_score"]),
                is_ood=bool(answer["is_ood"]),
                drifted=in_drift,
                ambiguity=_ambiguity(answer) if has_classes else None,
            )


def _doubt(answer: Mapping[str, Any]) -> float:
    """Return the uncertainty of a prediction, 0 to 1: one minus the largest probability.

    For several labels it is that of the least certain label: the smaller of p and 1 - p.
    """
    probabilities = answer["probabilities"].values()
    if "labels" in answer:
        return float(max(min(probability, 1 - probability) for probability in probabilities))
    return float(1 - max(probabilities))


def _ambiguity(answer: Mapping[str, Any]) -> float:
    probabilities = sorted(answer["probabilities"].values(), reverse=True)
    if "labels" in answer:
        return float(1 - min(abs(2 * one - 1) for one in probabilities))
    first, *others = probabilities
    return float(1 - first + (others[0] if others else 0.0))


def request_contents(request: LoggedRequest, contract: InputContract) -> dict[int, Content]:
    """Return the rows of a request that were not erased.

    ValueError if it does not fit `contract`.
    """
    is_json = request.content_type == "application/json"
    if is_json != isinstance(contract, (ColumnContract, TextContract)):
        raise ValueError("expected images, table rows or texts like the model's")
    if not is_json:
        images = decode_images(request.content_type, request.payload)
        return {item: one for item, one in enumerate(images) if item not in request.erased}
    content = json.loads(request.payload)
    rows = listed_rows(content) or [content]
    left = {item: row for item, row in enumerate(rows) if item not in request.erased}
    if isinstance(contract, TextContract):
        return {
            item: {name: row.get(name) for name in contract.columns} for item, row in left.items()
        }
    assert isinstance(contract, ColumnContract)
    return {
        item: {column.name: cell_value(row.get(column.name), column) for column in contract.columns}
        for item, row in left.items()
    }


def content_digest(content: Content) -> str:
    payload = (
        content if isinstance(content, bytes) else json.dumps(content, sort_keys=True).encode()
    )
    return hashlib.sha256(payload).hexdigest()


def _labelled(
    items: Sequence[LoggedItem],
    known: Mapping[tuple[str, int], GroundTruth],
    has_classes: bool,
    collected: SelectedRows,
) -> list[LoggedItem]:
    """Join items with labels.

    Of a reused id, returns the item to which the label belongs and the last item.
    """
    by_id: dict[tuple[str, int], list[LoggedItem]] = {}
    for item in sorted(items, key=lambda item: item.key[2]):
        by_id.setdefault(item.key[:2], []).append(item)
    chosen: list[LoggedItem] = []
    for name, same in by_id.items():
        label = known.get(name)
        place = None if label is None else _place_of(label, same)
        if label is not None and place is not None:
            same[place] = replace(same[place], truth=_value_of(label, has_classes))
        chosen += [item for number, item in enumerate(same) if number in (place, len(same) - 1)]
    collected.left_out["of a reused id"] += len(items) - len(chosen)
    return chosen


def _value_of(label: GroundTruth, has_classes: bool) -> str | float | None:
    return label.label if has_classes else label.value


def _place_of(label: GroundTruth, items: Sequence[LoggedItem]) -> int | None:
    """Return the index of the row that a label is for: the last one predicted before the label.

    None if all rows were predicted later.
    """
    num_before = sum(item.key[2] <= label.received for item in items)
    if num_before:
        return num_before - 1
    return 0 if items[0].key[2] <= label.received + EARLY_S else None


def _without_copies(items: Sequence[LoggedItem], collected: SelectedRows) -> list[LoggedItem]:
    """Return one row for each distinct content: the last one with a label, else the last one."""
    best: dict[str, LoggedItem] = {}
    for item in sorted(items, key=lambda item: (item.truth is not None, item.key[2])):
        before = best.get(item.digest)
        if before is not None and before.truth is not None and before.truth != item.truth:
            collected.left_out["with an older label"] += 1
        elif before is not None:
            collected.left_out["copies"] += 1
        best[item.digest] = item
    return list(best.values())


def _ranked(items: Sequence[LoggedItem]) -> list[LoggedItem]:
    """Sort by informativeness, then by time, newest first."""
    if not items:
        return []
    score = _ranks([item.error for item in items]) + _ranks([item.doubt for item in items])
    drifted = np.array([float(item.drifted) for item in items])
    score += _ranks([item.ood_score for item in items]) + drifted
    order = sorted(
        range(len(items)),
        key=lambda place: (-score[place], -items[place].key[2], items[place].digest),
    )
    return [items[place] for place in order]


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Return for each value the fraction of values below it, (rows,), in [0, 1)."""
    numbers = np.array(values)
    below: NDArray[np.float64] = np.searchsorted(np.sort(numbers), numbers, side="left") / len(
        numbers
    )
    return below


def read_contents(
    request_log: Path, wanted: set[Key], contract: InputContract
) -> dict[Key, Content]:
    """Return the contents of the wanted rows that are still in the log."""
    names = {key[0] for key in wanted}
    found: dict[Key, Content] = {}
    for request in read_requests(request_log):
        if isinstance(request, LoggedRequest) and request.request_id in names:
            moment = request.time.timestamp()
            keys = {(request.request_id, item, moment) for item in range(request.num_rows)}
            if not wanted.isdisjoint(keys):
                for item, content in request_contents(request, contract).items():
                    key = request.request_id, item, moment
                    if key in wanted:
                        found[key] = content
    return found
