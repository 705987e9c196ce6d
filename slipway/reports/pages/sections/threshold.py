"""Builds the evaluation page's section on thresholds, with a slider.

The slider's script is the only script of the pages. It reads the numbers from attributes, so no
text from the data is executed. Without scripts, the page still shows the curve and the table.
"""

import json
from collections.abc import Sequence
from html import escape

from slipway.kinds.registry import kind_of
from slipway.reports.console import number
from slipway.reports.evaluation.thresholds import (
    ThresholdStep,
    rejects_by_confidence,
    threshold_steps,
)
from slipway.reports.evaluation.uncertainty import UncertaintyReport
from slipway.reports.pages.charts import Series, line_chart
from slipway.reports.pages.html_page import Html, beside, figure, paragraph, section, table

_NAMES = {
    "accuracy": "accuracy",
    "subset_accuracy": "subset accuracy",
    "f1_macro": "F1, macro",
    "rmse": "RMSE",
    "mae": "MAE",
}
_START = 0.9  # fraction of the rows that is answered where the slider starts
_TABLE_STEPS = 10
_SCRIPT = """
for (const box of document.querySelectorAll(".slider")) {
  const steps = JSON.parse(box.dataset.steps), input = box.querySelector("input");
  const line = box.querySelector("polyline"), dot = line.cloneNode();
  dot.classList.add("knob");
  line.after(dot);
  const show = () => {
    const texts = steps[input.value], place = line.points[input.value];
    box.querySelectorAll("output").forEach((cell, index) => { cell.textContent = texts[index]; });
    dot.setAttribute("points", `${place.x},${place.y} ${place.x},${place.y}`);
    input.setAttribute("aria-valuetext", texts[0]);
  };
  input.addEventListener("input", show);
  show();
  box.querySelector(".control").hidden = false;
}
"""
_CLASS_NOTE = (
    "No setting of the service rejects rows: it answers all, and the caller compares the "
    "probability of the label with the threshold."
)
_NUMBER_NOTE = (
    "The service answers all rows. Rows above the threshold get `is_ood: true`, and the caller "
    "rejects them. The value is approximate: `evaluate` fits the threshold on validation rows."
)


def threshold_section(report: UncertaintyReport) -> Html:
    """Show the quality and the number of answered rows at each threshold."""
    steps, is_of_classes = threshold_steps(report), rejects_by_confidence(report)
    measure, bound = ("confidence", "at least") if is_of_classes else ("OOD score", "at most")
    headline = kind_of(report.task).target.headline
    columns = ["threshold", "rows answered", "fraction answered"]
    first, second = (_NAMES[name] for name in steps[0].metrics)
    columns += [first, "its interval", second] if steps[0].bounds else [first, second]
    rows = [_cells(step) for step in steps]
    snippets = [_snippet(step, is_of_classes) for step in steps]
    fractions = [step.fraction for step in steps]
    line = Series("", fractions, [step.metrics[headline] for step in steps])
    chart = figure(
        line_chart([line], "fraction of rows answered", _NAMES[headline]),
        f"Rows with {measure} {bound} the threshold",
        "On the right all rows are answered, on the left only those with the least doubt.",
    )
    start = min(range(len(steps)), key=lambda place: abs(fractions[place] - _START))
    content = [[*cells, snippet] for cells, snippet in zip(rows, snippets, strict=True)]
    control = _control([*columns, "to paste"], content[start], len(steps), start)
    shown = {round(place * (len(rows) - 1) / _TABLE_STEPS) for place in range(_TABLE_STEPS + 1)}
    return section(
        f"Threshold on the {measure}",
        Html(
            f'<div class="slider" data-steps="{escape(json.dumps(content))}">'
            f"{beside([chart, control])}</div>"
        ),
        table(columns, [rows[place] for place in sorted(shown, reverse=True)], numeric=columns),
        paragraph(_CLASS_NOTE if is_of_classes else _NUMBER_NOTE, "note"),
        Html(f"<script>{_SCRIPT}</script>"),
    )


def _control(names: Sequence[str], texts: Sequence[str], num_steps: int, start: int) -> Html:
    """Build the slider, hidden until the script shows it, and an output for each name."""
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td><output>{escape(text)}</output></td></tr>"
        for name, text in zip(names, texts, strict=True)
    )
    return Html(
        f'<div class="control" hidden><label>{escape(names[0])} <input type="range" min="0" '
        f'max="{num_steps - 1}" value="{start}"></label><table>{lines}</table></div>'
    )


def _cells(step: ThresholdStep) -> list[str]:
    first, second = map(number, step.metrics.values())
    bounds = [" to ".join(map(number, step.bounds))] if step.bounds else []
    counts = [f"{step.threshold:.10g}", f"{step.rows:,}", f"{step.fraction:.1%}"]
    return [*counts, first, *bounds, second]


def _snippet(step: ThresholdStep, is_of_classes: bool) -> str:
    if is_of_classes:
        return f'answer["probabilities"][answer["label"]] >= {step.threshold:.10g}'
    rejected = 1 - step.fraction
    return f"evaluate.ood_fraction: {rejected:.3g}" if rejected else "no row is rejected"
