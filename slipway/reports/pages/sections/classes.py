"""Builds the sections of the evaluation page for classes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.metrics.class_scores import class_scores, count_classes
from slipway.reports.evaluation.class_results import confusion
from slipway.reports.evaluation.record import Evaluation
from slipway.reports.pages.html_page import Html, beside, heat_map, image, paragraph, section, table

_MAX_CLASSES = 30  # in a heat map with readable numbers
_MAX_ROWS = 50  # in the table of classes
_MAX_PAIRS = 10


class ClassSections:
    """Scores of each class, and the confusion matrix."""

    INTERVAL_METHOD = (
        "by Wilson's method for fractions of correct rows, by bootstrap for the others, "
        "which leaves a perfect score no width"
    )
    ANSWER_COLUMNS = ("answer", "probability")

    @staticmethod
    def sections(evaluation: Evaluation) -> list[Html]:
        return [_classes(evaluation), _confusion(evaluation)]

    @staticmethod
    def answer_cells(evaluation: Evaluation, row: int) -> list[str]:
        target, prediction = evaluation.targets[row], evaluation.predictions[row]
        classes, outputs = evaluation.classes, evaluation.outputs[row]
        predicted, confidence = classes[int(prediction)], outputs[int(prediction)]
        if target == prediction:
            others = [k for k in np.argsort(-outputs, kind="stable") if k != int(prediction)]
            second = int(others[0])
            certainty = f"{confidence:.1%} against {outputs[second]:.1%} for {classes[second]}"
            return [f"{predicted}, correct", certainty]
        answer = f"{classes[int(target)]} predicted as {predicted}"
        return [answer, f"{outputs[int(target)]:.1%} against {confidence:.1%}"]


def _classes(evaluation: Evaluation) -> Html:
    matrix = confusion(evaluation)
    scores, counts = class_scores(count_classes(matrix)), matrix.sum(axis=1)
    title, order = "Classes", np.arange(len(evaluation.classes))
    if len(order) > _MAX_ROWS:
        title = f"The {_MAX_ROWS} weakest of {len(order)} classes"
        order = np.argsort(scores.f1, kind="stable")[:_MAX_ROWS]
    rows = [
        [
            evaluation.classes[k],
            str(counts[k]),
            *(f"{values[k]:.4f}" for values in (scores.precision, scores.recall, scores.f1)),
        ]
        for k in order
    ]
    columns = ["class", "rows", "precision", "recall", "F1"]
    shown = table(columns, rows, numeric=columns[1:])
    return section(title, beside([shown, _confused_pairs(evaluation)]))


def _confused_pairs(evaluation: Evaluation) -> Html:
    errors = confusion(evaluation) * ~np.eye(len(evaluation.classes), dtype=bool)
    actual, predicted = np.nonzero(errors)
    counts = errors[actual, predicted]
    if not len(counts):
        return paragraph("No row has a wrong label.", "good")
    rows = [
        [evaluation.classes[actual[i]], evaluation.classes[predicted[i]], str(counts[i])]
        for i in np.argsort(-counts, kind="stable")[:_MAX_PAIRS]
    ]
    return table(["actual", "predicted as", "rows"], rows, numeric=["rows"])


def _confusion(evaluation: Evaluation) -> Html:
    matrix, classes = confusion(evaluation), evaluation.classes
    note = (
        "Row: the actual class. Column: the predicted class. "
        "The colour is the fraction of the row, on a square-root scale."
    )
    return section("Confusion matrix", confusion_picture(matrix, classes), paragraph(note, "note"))


def confusion_picture(matrix: NDArray[np.int64], classes: Sequence[str]) -> Html:
    """Draw (K, K) counts as a heat map with numbers, or as an image for many classes."""
    if len(classes) <= _MAX_CLASSES:
        return heat_map(matrix, classes)
    fractions = np.sqrt(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1))
    pixels = np.rint(255 * fractions).astype(np.uint8)
    return image(pixels, f"Confusion matrix of {len(classes)} classes")
