"""Builds `reports/label_issues.html`: rows whose label is probably wrong, for a person to judge."""

from slipway.data.store.packed import Inputs
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind
from slipway.reports.evaluation.label_issues import LabelIssues
from slipway.reports.pages.exhibits import exhibits
from slipway.reports.pages.html_page import Html, beside, page, paragraph, section, table, tiles

_MOST_SHOWN = 96
_MOST_PAIRS = 20
_MOST_CLASSES = 50
_TITLE = "Labels that are probably wrong"
_ROWS_FILE = "reports/label_issues.parquet"


def page_of_no_audit() -> str:
    """Return the HTML page for `audit.folds: null`, which states that no audit ran."""
    how = (
        "Set audit.folds in params.yaml, for example to 5, and run dvc repro audit: "
        "this trains as many networks, each without one fold."
    )
    parts = [paragraph("audit.folds is null."), paragraph(how, "soft")]
    return page(_TITLE, "The audit is off", [section("No search", *parts)])


def label_issues_page(
    issues: LabelIssues, inputs: Inputs, contract: InputContract, about: str
) -> str:
    """Return the HTML page of the audited rows.

    Args:
        inputs: (N, ...) the audited rows, as `contract` describes them.
        about: one line that says how the rows were judged.
    """
    sections = [
        _headline(issues),
        _candidates(issues, inputs, contract),
        _by_class(issues),
        _folds(issues),
    ]
    return page(_TITLE, about, sections)


def _headline(issues: LabelIssues) -> Html:
    rows, estimated = len(issues.ids), issues.judgement.estimated
    boxes = [
        ("rows", f"{rows:,}", "of train and val"),
        ("estimated wrong", f"{estimated:,}", f"{estimated / rows:.2%} of the labels"),
        ("candidates", f"{len(issues.candidates):,}", "up to a quarter more than estimated"),
        ("accuracy", f"{issues.accuracy:.4f}", "against the given labels, out of fold"),
    ]
    notes = [
        "Every row was judged by a network that did not learn from it. "
        "Nothing was changed: a candidate is a proposal.",
        "The lower the accuracy, the more of the candidates are the networks' own mistakes.",
    ]
    return section("Headline", tiles(boxes), *(paragraph(note, "note") for note in notes))


def _candidates(issues: LabelIssues, inputs: Inputs, contract: InputContract) -> Html:
    shown, num_found = issues.candidates[:_MOST_SHOWN].tolist(), len(issues.candidates)
    if not shown:
        return section("Candidates", paragraph(f"None among {len(issues.ids):,} rows.", "good"))
    texts = [(row, _texts(issues, row)) for row in shown]
    seen = ", as the network sees them" if input_kind(contract.kind).has_pixels else ""
    many = f"{len(shown):,} of {num_found:,}" if len(shown) < num_found else f"All {num_found:,}"
    note = f"{many} candidates, the least probable label first{seen}. All rows are in {_ROWS_FILE}."
    rows = exhibits(inputs, contract, ["label", "probability", "row"], texts)
    return section("Candidates", rows, paragraph(note, "note"))


def _texts(issues: LabelIssues, row: int) -> list[str]:
    given, suggested = issues.classes[issues.given[row]], issues.classes[issues.suggested[row]]
    return [
        f"{given}, rather {suggested}",
        f"{issues.quality[row]:.1%} against {issues.confidence[row]:.1%}",
        issues.sources[row],
    ]


def _by_class(issues: LabelIssues) -> Html:
    pairs = [
        [given, suggested, f"{count:,}"] for given, suggested, count in issues.pairs()[:_MOST_PAIRS]
    ]
    fractions = {
        name: (found / max(rows, 1), rows, found)
        for name, (rows, found) in issues.class_counts().items()
    }
    worst_first = sorted(fractions.items(), key=lambda entry: (-entry[1][0], entry[0]))
    classes = [
        [name, f"{rows:,}", f"{found:,}", f"{fraction:.1%}"]
        for name, (fraction, rows, found) in worst_first[:_MOST_CLASSES]
    ]
    columns = ["label", "rows", "candidates", "fraction"]
    shown = table(["label", "rather", "candidates"], pairs, numeric=["candidates"])
    parts = [
        shown if pairs else paragraph("No pair of classes.", "good"),
        table(columns, classes, numeric=columns[1:]),
    ]
    return section("Candidates by class", beside(parts))


def _folds(issues: LabelIssues) -> Html:
    rows = [
        [str(fold), f"{int((issues.folds == fold).sum()):,}", f"{accuracy:.4f}"]
        for fold, accuracy in enumerate(issues.fold_accuracies)
    ]
    columns = ["fold", "rows", "accuracy"]
    return section("Folds", table(columns, rows, numeric=columns[1:]))
