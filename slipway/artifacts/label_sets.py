"""Sets of labels as one text: the labels of a row that may have several.

A set is a JSON list of its labels in alphabetical order without repetition. Equal sets have equal
texts, so whatever compares the labels of rows compares whole sets.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any


def set_text(labels: Iterable[str]) -> str:
    """Return the text of a set of labels."""
    return json.dumps(sorted(set(labels)), ensure_ascii=False)


def labels_in(text: str) -> list[str]:
    """Return the labels of a set, in alphabetical order."""
    labels: list[str] = json.loads(text)
    return labels


def named_label(answer: Mapping[str, Any]) -> str | None:
    """Return the label of an answer, or the text of its set of labels; None for a number."""
    if "labels" in answer:
        return set_text(answer["labels"])
    label: str | None = answer.get("label")
    return label
