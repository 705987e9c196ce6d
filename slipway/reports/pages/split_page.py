"""`reports/split.html`: how the rows were split, and the proof that the splits share nothing, on one page."""

from typing import Any

from slipway.data.engine.rows import SPLITS
from slipway.reports.pages.html_page import Html, PageSection, join, page, paragraph, table, tiles

_MOST_CLASSES = 50
_WAYS = {
    "given": "the given split: the user's own column, folders or shards",
    "time": "the time: train is the earliest, test the latest",
    "stable": "a hash of each unit: new rows move no old one",
    "exact": "exact shares in each class",
}
_COLUMNS = {
    "id": "ids",
    "sha256": "content",
    "group": "groups",
    "cluster": "near-duplicate clusters",
}


def split_page(report: dict[str, Any]) -> str:
    """The whole page, from what `reports/split.json` holds."""
    sections = [
        _counts(report),
        _leaks(report["leaks"]),
        *_target_copies(report.get("target_copies", [])),
        *_time(report["leaks"]["time_order"]),
        *_classes(report),
        *_folds(report["folds"]),
    ]
    return page("Split", f"By {_WAYS[report['way']]}; seed {report['seed']}", sections)


def _counts(report: dict[str, Any]) -> PageSection:
    counts = {name: report["splits"][name]["rows"] for name in SPLITS}
    total = sum(counts.values())
    asked = report["shares"]
    boxes = [
        (
            name,
            str(count),
            f"{count / total:.1%}" + (f", {asked[name]:.1%} asked for" if asked else ""),
        )
        for name, count in counts.items()
    ]
    units = report["units"]
    notes = [
        f"{units['number']} units of rows that belong together; the largest has {_count(units['largest'])}."
    ]
    if report["cut_from_train"]:
        latest = " by time: its latest rows" if report["cut_by_time"] else ""
        missing = " and no ".join(report["cut_from_train"])
        notes.append(f"The given split has no {missing}; it is cut from train{latest}.")
    if report["purged"]:
        notes.append(
            f"{report['purged']} rows were left out because their group or near duplicates reach a later split."
        )
    if worst := report["largest_deviation"]:
        what = f"of class {worst['class']}" if worst["class"] else "of all rows"
        notes.append(
            f"Furthest from what was asked: {worst['split']} has {worst['found']:.1%} {what}, {worst['asked']:.1%} asked for."
        )
    notes += [
        f"{name} lacks the classes {', '.join(found)}."
        for name, found in report["classes_missing"].items()
    ]
    return PageSection("Rows", join([tiles(boxes), *(paragraph(note, "note") for note in notes)]))


def _count(number: int) -> str:
    return "one row" if number == 1 else f"{number} rows"


def _leaks(leaks: dict[str, Any]) -> PageSection:
    pairs = list(next(iter(leaks["shared"].values())))
    rows = [
        [_COLUMNS[column], *(_shared(found[pair]) for pair in pairs)]
        for column, found in leaks["shared"].items()
    ]
    verdict = (
        paragraph(
            f"{_count(leaks['rows']).capitalize()} of val and test leak{'s' * (leaks['rows'] == 1)}",
            "bad",
        )
        if leaks["rows"]
        else paragraph("Nothing is shared", "good")
    )
    return PageSection(
        "Shared between splits", join([verdict, table(["", *pairs], rows, numeric=pairs)])
    )


def _shared(overlap: dict[str, Any]) -> str:
    return f"{overlap['values']} ({', '.join(overlap['examples'])})" if overlap["values"] else "0"


def _target_copies(copies: list[dict[str, Any]]) -> list[PageSection]:
    if not copies:
        return []
    rows = [[copy["column"], f"{copy['score']:.3f}", f"{copy['rows']:,}"] for copy in copies]
    note = (
        "Each of these columns alone tells the target of training rows that it was not fitted on. If it is known only after "
        "the target is, ignore it in data.columns."
    )
    body = join(
        [
            table(["column", "score", "training rows"], rows, numeric=["score", "training rows"]),
            paragraph(note, "bad"),
        ]
    )
    return [PageSection("Suspected copies of the target", body)]


def _time(order: dict[str, Any] | None) -> list[PageSection]:
    if not order:
        return []
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
    return [PageSection("Time order", join([table(columns, rows, numeric=columns[1:]), note]))]


def _classes(report: dict[str, Any]) -> list[PageSection]:
    splits = report["splits"]
    if "classes" not in splits["train"]:
        rows = [
            [name, f"{splits[name]['target']['mean']:.6g}", f"{splits[name]['target']['std']:.6g}"]
            for name in SPLITS
        ]
        return [
            PageSection(
                "Target",
                table(
                    ["split", "mean", "standard deviation"],
                    rows,
                    numeric=["mean", "standard deviation"],
                ),
            )
        ]
    names = sorted(
        splits["train"]["classes"],
        key=lambda name: (sum(splits[split]["classes"][name] for split in SPLITS), name),
    )
    rows = [
        [name, *(str(splits[split]["classes"][name]) for split in SPLITS)]
        for name in names[:_MOST_CLASSES]
    ]
    title = (
        "Classes"
        if len(names) <= _MOST_CLASSES
        else f"The {_MOST_CLASSES} smallest of {len(names)} classes"
    )
    return [PageSection(title, table(["class", *SPLITS], rows, numeric=SPLITS))]


def _folds(counts: list[int]) -> list[PageSection]:
    if not counts:
        return []
    body: Html = table(
        ["fold", "rows"],
        [[str(fold), str(count)] for fold, count in enumerate(counts)],
        numeric=["rows"],
    )
    return [PageSection("Folds of the rows that are not for testing", body)]
