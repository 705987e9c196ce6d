"""Builds the sections of the evaluation page for tasks with several labels per row."""

import numpy as np

from slipway.reports.evaluation.label_results import co_occurrence, label_table, names_of
from slipway.reports.evaluation.record import Evaluation
from slipway.reports.pages.html_page import Html, beside, heat_map, image, paragraph, section, table

_MAX_LABELS = 30  # in a heat map with readable numbers
_MAX_ROWS = 50  # in the table of labels


class LabelSections:
    """Threshold and scores of each label, and the labels that occur together."""

    INTERVAL_METHOD = (
        "by Wilson's method for the subset accuracy, by bootstrap for the others, "
        "which leaves a perfect score no width"
    )
    ANSWER_COLUMNS = ("answer", "wrong or missing")

    @staticmethod
    def sections(evaluation: Evaluation) -> list[Html]:
        return [_labels(evaluation), _together(evaluation)]

    @staticmethod
    def answer_cells(evaluation: Evaluation, row: int) -> list[str]:
        (given,) = names_of(evaluation.classes, evaluation.predictions[row : row + 1])
        probabilities = evaluation.outputs[row]
        wrong = [
            f"{name} {'missing' if evaluation.targets[row, place] else 'wrong'} "
            f"({probabilities[place]:.1%})"
            for place, name in enumerate(evaluation.classes)
            if evaluation.predictions[row, place] != evaluation.targets[row, place]
        ]
        return [", ".join(given) or "no label", ", ".join(wrong) or "none, correct"]


def _labels(evaluation: Evaluation) -> Html:
    found, title = label_table(evaluation), "Labels"
    if len(found) > _MAX_ROWS:
        title = f"The {_MAX_ROWS} weakest of {len(found)} labels"
        found = sorted(found, key=lambda entry: (entry["f1"], entry["label"]))[:_MAX_ROWS]
    numbers = ("threshold", "precision", "recall", "f1", "average_precision")
    rows = [
        [
            entry["label"],
            str(entry["rows"]),
            str(entry["given"]),
            *("" if entry[name] is None else f"{entry[name]:.4f}" for name in numbers),
        ]
        for entry in found
    ]
    columns = [
        *("label", "rows", "given", "threshold", "precision", "recall", "F1", "average precision")
    ]
    note = (
        "A label is given from its threshold on, which has the largest F1 on validation rows that "
        "fitted nothing else. Rows: of the test split that have it; given: that get it."
    )
    return section(title, table(columns, rows, numeric=columns[1:]), paragraph(note, "note"))


def _together(evaluation: Evaluation) -> Html:
    note = (
        "Number of test rows that have (left) or get (right) both labels; on the diagonal, one. "
        "A pair that is often given and rarely true is learnt from other labels, not from inputs."
    )
    pictures = [
        _matrix(evaluation, values) for values in (evaluation.targets, evaluation.predictions)
    ]
    return section("Labels that occur together", beside(pictures), paragraph(note, "note"))


def _matrix(evaluation: Evaluation, labels: np.ndarray) -> Html:
    matrix = co_occurrence(labels)
    if len(evaluation.classes) <= _MAX_LABELS:
        return heat_map(matrix, evaluation.classes)
    fractions = np.sqrt(matrix / max(1, matrix.max()))
    pixels = np.rint(255 * fractions).astype(np.uint8)
    return image(pixels, f"Co-occurrence of {len(evaluation.classes)} labels")
