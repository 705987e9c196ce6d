"""Converts sets of labels, the targets of multi-label data, to texts and back.

The text is a JSON list of the labels in alphabetical order without repetition. Equal sets have
equal texts, so code that compares the labels of rows works for sets too.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any


def set_text(labels: Iterable[str]) -> str:
    """Return a set of labels as text: a JSON list in alphabetical order."""
    return json.dumps(sorted(set(labels)), ensure_ascii=False)


def labels_in(text: str) -> list[str]:
    """Parse the text of a set. Returns its labels in alphabetical order."""
    labels: list[str] = json.loads(text)
    return labels


def named_label(answer: Mapping[str, Any]) -> str | None:
    """Return the label of a prediction, or its set of labels as text; None for a number."""
    if "labels" in answer:
        return set_text(answer["labels"])
    label: str | None = answer.get("label")
    return label
