"""Builds `reports/split.html`: the split of the rows, and the check for shared content."""

from collections.abc import Sequence
from typing import Any

from slipway.data.engine.rows import SPLITS
from slipway.reports.pages.charts import BarGroup, bar_groups, step_chart
from slipway.reports.pages.html_page import Html, join, page, paragraph, section, table, tiles

_MOST_CLASSES = 50
_MOST_BARS = 20  # classes
_WAYS = {
    "given": "the given split: the user's own column, folders or shards",
    "time": "the time: train is the earliest, test the latest",
    "stable": "a hash of each unit: new rows move no old one",
    "exact": "exact fractions in each class",
}
_COLUMNS = {
    "id": "ids",
    "sha256": "content",
    "group": "groups",
    "cluster": "near-duplicate clusters",
}


def split_page(report: dict[str, Any]) -> str:
    """Return the HTML page of the content of `reports/split.json`."""
    scores = report.get("column_scores")
    copies, order = report.get("target_copies"), report["leaks"]["time_order"]
    sections = [
        _counts(report),
        _leaks(report["leaks"]),
        _target_copies(copies) if copies else None,
        _column_scores(scores) if scores else None,
        _time(order) if order else None,
        _targets(report["splits"]),
        _folds(report["folds"]) if report["folds"] else None,
    ]
    return page("Split", f"By {_WAYS[report['way']]}; seed {report['seed']}", sections)


def _counts(report: dict[str, Any]) -> Html:
    counts = {name: report["splits"][name]["rows"] for name in SPLITS}
    total, requested = sum(counts.values()), report["fractions"]
    wanted = {name: f", {requested[name]:.1%} requested" if requested else "" for name in counts}
    boxes = [
        (name, str(count), f"{count / total:.1%}{wanted[name]}") for name, count in counts.items()
    ]
    units = report["units"]
    notes = [
        f"{units['number']} units of rows that belong together; "
        f"the largest has {_count(units['largest'])}."
    ]
    if report["cut_from_train"]:
        latest = " by time: its latest rows" if report["cut_by_time"] else ""
        missing = " and no ".join(report["cut_from_train"])
        notes.append(
            f"The given val is the only split that is held out, so it is test; val is cut from "
            f"train{latest}."
            if report["val_is_test"]
            else f"The given split has no {missing}; it is cut from train{latest}."
        )
    if report["purged"]:
        notes.append(
            f"{report['purged']} rows were left out because their group or near duplicates "
            "reach a later split."
        )
    if worst := report["largest_deviation"]:
        what = f"of class {worst['class']}" if worst["class"] else "of all rows"
        notes.append(
            f"Furthest from the requested fractions: {worst['split']} has {worst['found']:.1%} "
            f"{what} instead of {worst['requested']:.1%}."
        )
    notes += [
        f"{name} lacks the classes {', '.join(found)}."
        for name, found in report["classes_missing"].items()
    ]
    return section("Rows", tiles(boxes), *(paragraph(note, "note") for note in notes))


def _count(number: int) -> str:
    return "one row" if number == 1 else f"{number} rows"


def _leaks(leaks: dict[str, Any]) -> Html:
    pairs = list(next(iter(leaks["shared"].values())))
    rows = [
        [_COLUMNS[column], *(_shared(found[pair]) for pair in pairs)]
        for column, found in leaks["shared"].items()
    ]
    leaked = f"{_count(leaks['rows']).capitalize()} of val and test"
    verdict = f"{leaked} {'leaks' if leaks['rows'] == 1 else 'leak'}"
    return section(
        "Shared between splits",
        paragraph(verdict, "bad") if leaks["rows"] else paragraph("Nothing is shared", "good"),
        table(["", *pairs], rows, numeric=pairs),
    )


def _shared(overlap: dict[str, Any]) -> str:
    return f"{overlap['values']} ({', '.join(overlap['examples'])})" if overlap["values"] else "0"


def _target_copies(copies: list[dict[str, Any]]) -> Html:
    note = (
        "Each of these columns alone predicts the target of training rows that it was not fitted "
        "on. If it is known only after the target, ignore it in data.columns."
    )
    return section("Suspected copies of the target", _scores(copies), paragraph(note, "bad"))


def _column_scores(scores: list[dict[str, Any]]) -> Html:
    note = (
        "1 is a perfect prediction of the target by this column alone. For classes the score is "
        "the balanced accuracy; for a number it is R2, in which 0 is as bad as the mean."
    )
    return section("Each column alone", _scores(scores), paragraph(note, "note"))


def _scores(scores: list[dict[str, Any]]) -> Html:
    """Return a table of columns with their scores."""
    columns = ["column", "score", "rows"]
    rows = [[score["column"], f"{score['score']:.3f}", f"{score['rows']:,}"] for score in scores]
    return table(columns, rows, numeric=columns[1:])


def _time(order: dict[str, Any]) -> Html:
    rows = [
        [
            pair,
            f"{found['latest_before']:g}",
            f"{found['earliest_after']:g}",
            str(found["rows_not_later"]),
        ]
        for pair, found in order.items()
    ]
    columns = ["splits", "latest of the first", "earliest of the second", "rows not later"]
    note = paragraph("In days since 1970 UTC, or in the unit of the time column.", "note")
    return section("Time order", table(columns, rows, numeric=columns[1:]), note)


def _folds(counts: list[int]) -> Html:
    rows = [[str(fold), str(count)] for fold, count in enumerate(counts)]
    shown = table(["fold", "rows"], rows, numeric=["rows"])
    return section("Folds of the rows outside the test split", shown)


def _targets(splits: dict[str, Any]) -> Html:
    """Show the classes of each split, or the mean and spread of a numeric target."""
    if "classes" not in splits["train"]:
        targets = {name: splits[name]["target"] for name in SPLITS}
        rows = [[name, f"{own['mean']:.6g}", f"{own['std']:.6g}"] for name, own in targets.items()]
        columns = ["split", "mean", "standard deviation"]
        counts = {name: own["histogram"] for name, own in targets.items()}
        low, high = targets["train"]["low"], targets["train"]["high"]
        drawn = step_chart(counts, low, high, "target")
        return section("Target", drawn, table(columns, rows, numeric=columns[1:]))
    counts = {
        name: [splits[split]["classes"][name] for split in SPLITS]
        for name in splits["train"]["classes"]
    }
    names = sorted(counts, key=lambda name: (sum(counts[name]), name))
    rows = [[name, *map(str, counts[name])] for name in names[:_MOST_CLASSES]]
    smallest = f"The {_MOST_CLASSES} smallest of {len(names)} classes"
    title = smallest if len(names) > _MOST_CLASSES else "Classes"
    shown = table(["class", *SPLITS], rows, numeric=SPLITS)
    return section(title, _class_bars(splits, counts, names[:_MOST_BARS]), shown)


def _class_bars(splits: dict[str, Any], counts: dict[str, list[int]], names: Sequence[str]) -> Html:
    totals = [splits[split]["rows"] for split in SPLITS]
    groups = []
    for name in names:
        fractions = [count / total for count, total in zip(counts[name], totals, strict=True)]
        of_all = f"{sum(counts[name]) / sum(totals):.1%}"
        groups.append(BarGroup(name, dict(zip(SPLITS, fractions, strict=True)), of_all))
    text = "Fraction of the rows of each split that have the class; at the end, of all rows"
    return join([bar_groups(groups, SPLITS, text), paragraph(f"{text}.", "note")])
