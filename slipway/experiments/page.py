"""The page of `slipway compare --html`: the experiments as a chart of intervals and a table."""

from collections.abc import Sequence
from datetime import datetime

from slipway.artifacts.bundle import Metric
from slipway.config.yaml_text import as_yaml
from slipway.experiments.comparison import Comparison
from slipway.experiments.records import ExperimentRecord, shortened
from slipway.reports.console import interval, number
from slipway.reports.pages.html_page import Html, page, paragraph, section, table
from slipway.reports.pages.intervals import IntervalRow, interval_bars, interval_chart

_LONGEST_CAUSE = 500  # characters


def comparison_page(comparison: Comparison) -> str:
    """Return the HTML page, with experiments in the order of the comparison."""
    shown, every = len(comparison.records), len(comparison.every)
    subtitle = f"{shown} of {every} experiments" if shown < every else f"{every} experiments"
    sections: list[Html | None]
    if not comparison.records:
        sections = [section("Experiments", paragraph("There is none yet: `slipway run`.", "soft"))]
    else:
        sections = [_results(comparison), _params(comparison), _failures(comparison.records)]
    return page("Experiments", subtitle, sections)


def _results(comparison: Comparison) -> Html:
    measured = [record for record in comparison.records if _metric(record)]
    if not measured:
        return section("Results", paragraph("No experiment here has a metric yet.", "soft"))
    headlines = {record.results.headline for record in measured if record.results}
    name = headlines.pop() if len(headlines) == 1 else "metric"
    columns = ["experiment", name, "interval", "baseline", "log loss", "seconds", "gates"]
    rows, bars, named = [], [], {}
    for record in measured:
        found, results = _metric(record), record.results
        assert found is not None
        assert results is not None
        rows.append(
            [
                record.name,
                number(found.value),
                interval(found),
                "" if results.baseline is None else number(results.baseline),
                "" if results.log_loss is None else number(results.log_loss),
                "" if record.seconds is None else f"{record.seconds:.0f}",
                ", ".join(filter(None, record.verdicts)),
            ]
        )
        is_bad = results.gates in ("missed", "unjudged")
        bars.append(IntervalRow(found, is_bad))
        named[record.name] = IntervalRow(found, is_bad, results.baseline)
    numeric = [name, "baseline", "log loss", "seconds"]
    note = (
        "The dot is the value on the test rows, the bar its interval. Intervals that overlap do "
        "not prove that one experiment is better."
    )
    shown = table(columns, rows, numeric, last=interval_bars(bars))
    chart = interval_chart(named, "the trivial baseline on the same rows")
    return section("Results", chart, shown, paragraph(note, "note"))


def _params(comparison: Comparison) -> Html | None:
    keys = comparison.changed
    if not keys:
        return None
    rows = [
        [
            record.name,
            datetime.fromisoformat(record.started).astimezone().strftime("%Y-%m-%d %H:%M"),
            *(as_yaml(record.params[key]) if key in record.params else "" for key in keys),
        ]
        for record in comparison.records
    ]
    return section("Changed params", table(["experiment", "started", *keys], rows, keys))


def _failures(records: Sequence[ExperimentRecord]) -> Html | None:
    rows = [
        [record.name, record.ended, shortened(record.reason, _LONGEST_CAUSE)]
        for record in records
        if record.reason
    ]
    if not rows:
        return None
    return section("Remarks", table(["experiment", "status", "cause"], rows))


def _metric(record: ExperimentRecord) -> Metric | None:
    return record.results.metric if record.results else None
