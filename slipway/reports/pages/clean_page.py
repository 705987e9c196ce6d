"""`reports/clean.html`: what was read, refused, flagged and corrected, with pictures where there are any.

The page is drawn from the record alone, so images and tables share it; a table's record comes without pictures.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.data.rules.report import CleanReport, Clusters, Example, RuleCount, TargetSummary
from slipway.reports.pages.charts import bars
from slipway.reports.pages.html_page import (
    Html,
    PageSection,
    figure,
    gallery,
    image,
    join,
    page,
    paragraph,
    table,
    tiles,
)

Pictures = Mapping[str, NDArray[np.uint8]]  # by source, (H, W, 3)
MAX_PICTURES = 8  # of one rule
_MAX_CLASSES = 50


def shown_sources(report: CleanReport) -> list[str]:
    """The samples whose pictures the page has a place for."""
    examples = [
        example.source
        for rules in (report.refused, report.flagged)
        for rule in rules.values()
        for example in _shown(rule)
    ]
    return list(
        dict.fromkeys(
            [*examples, *(source for group in _groups(report.clusters) for source in group)]
        )
    )


def clean_page(report: CleanReport, pictures: Pictures) -> str:
    """The whole page; `pictures` may lack any source, which is then shown by name alone."""
    sections = [
        PageSection("Samples", _totals(report)),
        *_rule_sections("Refused", report.refused, pictures),
        *_rule_sections("Flagged, and kept", report.flagged, pictures),
        *(
            [PageSection("Pictures that look the same", _clusters(report.clusters, pictures))]
            if report.clusters
            else []
        ),
        PageSection("Corrections", _corrections(report.corrections)),
        *([PageSection("Columns", _columns(report))] if report.columns else []),
        *([PageSection("Classes", _classes(report.classes))] if report.classes is not None else []),
        *([PageSection("Target", _target(report.target))] if report.target is not None else []),
        PageSection("Checks", _checks(report)),
    ]
    return page("Cleaning", f"{report.kept:,} of {report.read:,} samples are kept", sections)


def _totals(report: CleanReport) -> Html:
    bad = sum(rule.count for rule in report.refused.values() if rule.severity == "error")
    duplicates = sum(rule.count for rule in report.refused.values() if rule.severity == "duplicate")
    flags = sum(rule.count for rule in report.flagged.values())
    return tiles(
        [
            ("read", f"{report.read:,}", ""),
            ("kept", f"{report.kept:,}", _share(report.kept, report.read)),
            ("bad", f"{bad:,}", _share(bad, report.read)),
            ("duplicates", f"{duplicates:,}", "refused, not counted as bad"),
            ("flags", f"{flags:,}", "on rows that are kept"),
        ]
    )


def _share(count: int, total: int) -> str:
    return f"{count / total:.2%} of those read" if total else ""


def _rule_sections(
    title: str, rules: Mapping[str, RuleCount], pictures: Pictures
) -> list[PageSection]:
    if not rules:
        return [PageSection(title, paragraph("None.", "soft"))]
    order = sorted(rules.items(), key=lambda entry: (-entry[1].count, entry[0]))
    rows = [[name, f"{rule.count:,}", rule.meaning] for name, rule in order]
    overview = PageSection(title, table(["rule", "rows", "meaning"], rows, numeric=["rows"]))
    return [
        overview,
        *(
            PageSection(f"{title}: {name} ({rule.count:,})", _examples(rule, pictures))
            for name, rule in order
        ),
    ]


def _shown(rule: RuleCount) -> Sequence[Example]:
    return rule.examples[:MAX_PICTURES]


def _examples(rule: RuleCount, pictures: Pictures) -> Html:
    shown = _shown(rule)
    figures = [
        _figure(example.source, example.detail, pictures)
        for example in shown
        if example.source in pictures
    ]
    others = [
        [example.source, example.detail] for example in shown if example.source not in pictures
    ]
    parts = [
        *([gallery(figures)] if figures else []),
        *([table(["source", "what was found"], others)] if others else []),
    ]
    return join([*parts, *([_rest(rule, len(shown))] if rule.count > len(shown) else [])])


def _rest(rule: RuleCount, num_shown: int) -> Html:
    table_name, column = ("rows", "flags") if rule.severity == "flag" else ("quarantine", "rule")
    return paragraph(
        f"These are {num_shown} of {rule.count:,}; all are in data/clean/{table_name}.parquet, column {column}.",
        "note",
    )


def _figure(source: str, detail: str, pictures: Pictures) -> Html:
    return figure(image(pictures[source], source), source, detail)


def _groups(clusters: Clusters | None) -> list[list[str]]:
    return clusters.examples if clusters else []


def _clusters(clusters: Clusters, pictures: Pictures) -> Html:
    if not clusters.count:
        return paragraph("None.", "soft")
    places = (
        "one cluster"
        if clusters.count == 1
        else f"{clusters.count:,} clusters, the largest of {clusters.largest:,}"
    )
    text = f"{clusters.rows:,} kept rows are in {places}. Each cluster stays in one split, unless the split is given."
    rows = [
        gallery(
            _figure(source, f"cluster {number}", pictures) for source in group if source in pictures
        )
        for number, group in enumerate(clusters.examples, 1)
    ]
    return join([paragraph(text), *rows])


def _corrections(corrections: Mapping[str, int]) -> Html:
    if not corrections:
        return paragraph("None.", "soft")
    return table(
        ["what was changed", "rows"],
        [[name, f"{count:,}"] for name, count in corrections.items()],
        numeric=["rows"],
    )


def _columns(report: CleanReport) -> Html:
    rows = [
        [column.name, column.kind, f"{column.missing:,}", column.note] for column in report.columns
    ]
    return table(["column", "kind", "missing", "note"], rows, numeric=["missing"])


def _classes(classes: Mapping[str, int]) -> Html:
    total = sum(classes.values())
    order = sorted(classes.items(), key=lambda entry: (-entry[1], entry[0]))
    rows = [[name, f"{count:,}", f"{count / total:.1%}"] for name, count in order[:_MAX_CLASSES]]
    rest = (
        [paragraph(f"And {len(order) - _MAX_CLASSES:,} smaller ones.", "soft")]
        if len(order) > _MAX_CLASSES
        else []
    )
    return join([table(["class", "rows", "share"], rows, numeric=["rows", "share"]), *rest])


def _target(target: TargetSummary) -> Html:
    numbers = [
        (name, f"{getattr(target, name):.4g}", "")
        for name in ("min", "p25", "median", "p75", "max", "mean", "std")
    ]
    return join([tiles(numbers), bars(target.histogram, target.min, target.max, "target")])


def _checks(report: CleanReport) -> Html:
    skipped = [[rule, reason] for rule, reason in report.not_checked.items()]
    ran = paragraph(f"{len(report.checks)} rules were checked: {', '.join(report.checks)}.")
    return join([ran, *([table(["not checked", "because"], skipped)] if skipped else [])])
