"""Builds `reports/clean.html`: the samples that were read, refused, flagged and corrected.

The page needs only the record `reports/clean.json`, and for images the pictures of the samples that
it shows, which are read from the raw data.
"""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.config.sections import DataParams
from slipway.data.rules.report import (
    CleanReport,
    Clusters,
    ColumnSummary,
    Example,
    RuleCount,
    TargetSummary,
    TextProfile,
)
from slipway.data.sources.sources import read_samples
from slipway.inputs.images import decode_image, flatten
from slipway.reports.console import number
from slipway.reports.pages.charts import BarGroup, bar_groups, bars
from slipway.reports.pages.html_page import (
    Html,
    beside,
    figure,
    gallery,
    image,
    page,
    paragraph,
    section,
    table,
    tiles,
)
from slipway.system.errors import ImageError

Pictures = Mapping[str, NDArray[np.uint8]]  # by source, (H, W, 3)
MAX_PICTURES = 8  # shown for one rule
_SIDE_PX = 128
_MAX_CLASSES = 50
_SEVERITIES = {
    "flag": "flagged, and kept",
    "error": "refused",
    "duplicate": "left out, not bad",
    "unlabelled": "left out, not bad",
}
_SIZES = {
    "width": "pixels of width",
    "height": "pixels of height",
    "bytes": "bytes",
    "characters": "characters",
}


def shown_sources(report: CleanReport) -> list[str]:
    """List the samples whose pictures the page shows."""
    rules = [*report.refused.values(), *report.flagged.values()]
    examples = [example.source for rule in rules for example in _shown(rule)]
    clusters = report.clusters.examples if report.clusters else []
    return list(dict.fromkeys([*examples, *(source for group in clusters for source in group)]))


def pictures_of(report: CleanReport, data: DataParams, max_pixels: int) -> Pictures:
    """Return the decodable pictures by source, as (H, W, 3) uint8 of at most 128 px."""
    pictures = {}
    wanted = shown_sources(report)
    for sample in read_samples(data, wanted) if wanted else ():
        with contextlib.suppress(ImageError):
            image = flatten(decode_image(sample.payload, max_pixels), channels=3)
            image.thumbnail((_SIDE_PX, _SIDE_PX))
            pictures[sample.source] = np.asarray(image, dtype=np.uint8)
    return pictures


def clean_page(report: CleanReport, pictures: Pictures) -> str:
    """Return the HTML page; a source without a picture is shown by its name."""
    sections = [
        _totals(report),
        section("Hints", *map(paragraph, report.hints)) if report.hints else None,
        _rule_bars(report) if report.refused or report.flagged else None,
        *_rule_sections("Refused", report.refused, pictures, report.excerpts),
        *_rule_sections("Flagged, and kept", report.flagged, pictures, report.excerpts),
        _clusters(report.clusters, pictures, report.excerpts) if report.clusters else None,
        *(_texts(report.texts) if report.texts else ()),
        _corrections(report.corrections),
        _columns(report.columns) if report.columns else None,
        _classes(report.classes) if report.classes is not None else None,
        _target(report.target) if report.target else None,
        _sizes(report.sizes) if report.sizes else None,
        _checks(report),
    ]
    return page("Cleaning", f"{report.kept:,} of {report.read:,} samples are kept", sections)


def _totals(report: CleanReport) -> Html:
    refused = Counter[str]()
    for rule in report.refused.values():
        refused[rule.severity] += rule.count
    bad, unlabelled = refused["error"], refused["unlabelled"]
    flags = sum(rule.count for rule in report.flagged.values())
    boxes = tiles(
        [
            ("read", f"{report.read:,}", ""),
            ("kept", f"{report.kept:,}", _fraction(report.kept, report.read)),
            ("bad", f"{bad:,}", _fraction(bad, report.read - unlabelled)),
            *[("without a target", f"{unlabelled:,}", "set aside")] * bool(unlabelled),
            ("duplicates", f"{refused['duplicate']:,}", "refused, not counted as bad"),
            ("flags", f"{flags:,}", "on rows that are kept"),
        ]
    )
    return section("Samples", boxes)


def _fraction(count: int, total: int) -> str:
    return f"{count / total:.2%} of those read" if total else ""


def _rule_bars(report: CleanReport) -> Html:
    rules = sorted(
        [*report.refused.items(), *report.flagged.items()],
        key=lambda entry: (-entry[1].count, entry[0]),
    )
    groups = [
        BarGroup(name, {_SEVERITIES[rule.severity]: rule.count}, f"{rule.count:,}")
        for name, rule in rules
    ]
    series = list(dict.fromkeys(_SEVERITIES.values()))
    drawn = bar_groups(groups, series, "Rows that broke each rule")
    return section("Rules", drawn)


def _rule_sections(
    title: str, rules: Mapping[str, RuleCount], pictures: Pictures, excerpts: Mapping[str, str]
) -> list[Html]:
    if not rules:
        return [section(title, paragraph("None.", "soft"))]
    order = sorted(rules.items(), key=lambda entry: (-entry[1].count, entry[0]))
    rows = [[name, f"{rule.count:,}", rule.meaning] for name, rule in order]
    examples = [
        section(f"{title}: {name} ({rule.count:,})", *_examples(rule, pictures, excerpts))
        for name, rule in order
    ]
    return [section(title, table(["rule", "rows", "meaning"], rows, numeric=["rows"])), *examples]


def _shown(rule: RuleCount) -> Sequence[Example]:
    return rule.examples[:MAX_PICTURES]


def _examples(
    rule: RuleCount, pictures: Pictures, excerpts: Mapping[str, str]
) -> list[Html | None]:
    shown = _shown(rule)
    figures = [_figure(one.source, one.detail, pictures) for one in shown if one.source in pictures]
    others = [[one.source, one.detail] for one in shown if one.source not in pictures]
    columns = ["source", "what was found"]
    if excerpts:
        columns.append("text")
        others = [[*row, excerpts.get(row[0], "")] for row in others]
    file, column = ("rows", "flags") if rule.severity == "flag" else ("quarantine", "rule")
    more = (
        f"These are {len(shown)} of {rule.count:,}; "
        f"all are in data/clean/{file}.parquet, column {column}."
    )
    return [
        gallery(figures) if figures else None,
        table(columns, others) if others else None,
        paragraph(more, "note") if rule.count > len(shown) else None,
    ]


def _figure(source: str, detail: str, pictures: Pictures) -> Html:
    return figure(image(pictures[source], source), source, detail)


def _clusters(clusters: Clusters, pictures: Pictures, excerpts: Mapping[str, str]) -> Html:
    title = "Texts that are nearly the same" if excerpts else "Pictures that look the same"
    if not clusters.count:
        return section(title, paragraph("None.", "soft"))
    many = f"{clusters.count:,} clusters, the largest of {clusters.largest:,}"
    places = "one cluster" if clusters.count == 1 else many
    text = (
        f"{clusters.rows:,} kept rows are in {places}. "
        "Each cluster stays in one split, unless the split is given."
    )
    rows = [
        gallery(
            _figure(source, f"cluster {number}", pictures) for source in group if source in pictures
        )
        for number, group in enumerate(clusters.examples, 1)
    ]
    texts = [
        [str(number), source, excerpts[source]]
        for number, group in enumerate(clusters.examples, 1)
        for source in group
        if source in excerpts
    ]
    words = table(["cluster", "source", "text"], texts) if texts else None
    return section(title, paragraph(text), words, *(rows if pictures else ()))


def _texts(texts: TextProfile) -> list[Html]:
    scripts = [[script, f"{rows:,}"] for script, rows in texts.scripts.items()]
    found = [section("Scripts", table(["most letters", "rows"], scripts, numeric=["rows"]))]
    if not texts.sampled:
        return found
    terms = [[name, ", ".join(words) or "none"] for name, words in texts.terms.items()]
    found.append(
        section(
            "Most telling words",
            table(["class", "words and pairs of words"], terms),
            paragraph(
                f"Of {texts.sampled:,} texts. [email], [phone] and [card] stand for such data.",
                "note",
            ),
        )
    )
    passages = [[one.of, f"{one.fraction:.0%}", one.text] for one in texts.passages]
    if passages:
        columns = ["class", "texts of the class", "passage"]
        found.append(
            section("Passages of one class only", table(columns, passages, numeric=[columns[1]]))
        )
    return found


def _corrections(corrections: Mapping[str, int]) -> Html:
    rows = [[name, f"{count:,}"] for name, count in corrections.items()]
    shown = table(["what was changed", "rows"], rows, numeric=["rows"])
    return section("Corrections", shown if rows else paragraph("None.", "soft"))


def _columns(found: Sequence[ColumnSummary]) -> Html:
    rows = [[column.name, column.kind, f"{column.missing:,}", column.note] for column in found]
    columns = ["column", "kind", "missing", "note"]
    return section("Columns", table(columns, rows, numeric=["missing"]))


def _classes(classes: Mapping[str, int]) -> Html:
    total = sum(classes.values())
    order = sorted(classes.items(), key=lambda entry: (-entry[1], entry[0]))
    rows = [[name, f"{count:,}", f"{count / total:.1%}"] for name, count in order[:_MAX_CLASSES]]
    shown = table(["class", "rows", "fraction"], rows, numeric=["rows", "fraction"])
    more = len(order) - _MAX_CLASSES
    rest = paragraph(f"And {more:,} smaller ones.", "soft") if more > 0 else None
    return section("Classes", shown, rest)


def _target(target: TargetSummary) -> Html:
    names = ("min", "p25", "median", "p75", "max", "mean", "std")
    numbers = [(name, number(getattr(target, name)), "") for name in names]
    drawn = bars(target.histogram, target.min, target.max, "target")
    return section("Target", tiles(numbers), drawn)


def _sizes(sizes: Mapping[str, TargetSummary]) -> Html:
    charts = [
        figure(
            bars(found.histogram, found.min, found.max, _SIZES[name]),
            _SIZES[name].capitalize(),
            f"{number(found.min)} to {number(found.max)}, median {number(found.median)}",
        )
        for name, found in sizes.items()
        if found.min < found.max
    ]
    constant = [
        paragraph(f"All rows have {found.min:g} {_SIZES[name]}.")
        for name, found in sizes.items()
        if found.min == found.max
    ]
    return section("Sizes", *constant, beside(charts))


def _checks(report: CleanReport) -> Html:
    ran = paragraph(f"{len(report.checks)} rules were checked: {', '.join(report.checks)}.")
    skipped = [[rule, reason] for rule, reason in report.not_checked.items()]
    return section("Checks", ran, table(["not checked", "because"], skipped) if skipped else None)
