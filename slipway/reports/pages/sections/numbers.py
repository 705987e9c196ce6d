"""Builds the sections of the evaluation page for a numeric target."""

import numpy as np

from slipway.reports.console import interval, number
from slipway.reports.evaluation.record import Evaluation
from slipway.reports.pages.charts import histogram, residuals, scatter
from slipway.reports.pages.html_page import Html, beside, figure, paragraph, section, table

_MAX_DOTS = 3000


class NumberSections:
    """Predictions and errors, and errors by range of the target."""

    INTERVAL_METHOD = "by bootstrap"
    ANSWER_COLUMNS = ("answer",)

    @staticmethod
    def sections(evaluation: Evaluation) -> list[Html | None]:
        by_target = _by_target(evaluation) if evaluation.target_errors else None
        return [_values(evaluation), by_target]

    @staticmethod
    def answer_cells(evaluation: Evaluation, row: int) -> list[str]:
        target, prediction = evaluation.targets[row], evaluation.predictions[row]
        return [f"{number(prediction)} instead of {number(target)}"]


def _values(evaluation: Evaluation) -> Html:
    targets, values = evaluation.targets, evaluation.predictions
    shown = np.unique(np.linspace(0, len(targets) - 1, _MAX_DOTS).astype(np.int64))
    some, errors = targets[shown], values - targets
    predictions = figure(
        scatter(some, values[shown], "target", "prediction"),
        "Prediction against target",
        f"{len(shown)} of {len(targets)} rows; predictions on the dashed line are correct.",
    )
    trend = figure(
        residuals(some, errors[shown], "target", "prediction - target"),
        "Error against target",
        "A slope means that small targets are overestimated and large ones underestimated.",
    )
    distribution = figure(
        histogram(errors, "prediction - target"),
        "Errors",
        f"All {len(targets)} rows; right of 0 the prediction is too large.",
    )
    return section("Predictions", beside([predictions, trend, distribution]))


def _by_target(evaluation: Evaluation) -> Html:
    rows = []
    for entry in evaluation.target_errors:
        row = [f"{number(entry.low)} to {number(entry.high)}", str(entry.rmse.rows)]
        for metric in (entry.mean_error, entry.mae, entry.rmse):
            row += [number(metric.value), interval(metric)]
        rows.append(row)
    numeric = ["rows", "mean error", "MAE", "RMSE"]
    columns = ["target", "rows"]
    for name in numeric[1:]:
        columns += [name, "its interval"]
    note = (
        "The ranges have about equal numbers of rows. "
        "If the mean error is above 0, predictions are too large."
    )
    shown = table(columns, rows, numeric=numeric)
    return section("Errors by target", shown, paragraph(note, "note"))
