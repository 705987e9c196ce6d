"""`reports/label_issues.html`: the rows whose label is probably wrong, with their pictures or cells, for a person to judge."""

from collections.abc import Sequence

from slipway.data.store.packed import Inputs
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind
from slipway.reports.evaluation.label_issues import LabelIssues
from slipway.reports.pages.html_page import (
    Html,
    PageSection,
    beside,
    figure,
    gallery,
    image,
    join,
    page,
    paragraph,
    table,
    tiles,
)
from slipway.reports.pages.shown_cells import shown_cells

_MOST_SHOWN = 96
_MOST_PAIRS = 20
_MOST_CLASSES = 50
_TITLE = "Labels that are probably wrong"
_ROWS_FILE = "reports/label_issues.parquet"


def page_of_no_audit() -> str:
    """The page where `audit.folds` is null."""
    how = "Set audit.folds in params.yaml to 5, say, and run dvc repro audit: so many networks are trained, each without one fold."
    return page(
        _TITLE,
        "No audit was asked for",
        [
            PageSection(
                "Not looked for", join([paragraph("audit.folds is null."), paragraph(how, "soft")])
            )
        ],
    )


def label_issues_page(
    issues: LabelIssues, inputs: Inputs, contract: InputContract, about: str
) -> str:
    """The whole page. `inputs` (N, ...) are the audited rows as `contract` says; `about` says in one line how they were judged."""
    return page(
        _TITLE,
        about,
        [_headline(issues), _candidates(issues, inputs, contract), _where(issues), _folds(issues)],
    )


def _headline(issues: LabelIssues) -> PageSection:
    rows, found = len(issues.ids), len(issues.candidates)
    boxes = [
        ("rows", f"{rows:,}", "of train and val"),
        (
            "estimated wrong",
            f"{issues.judgement.estimated:,}",
            f"{issues.judgement.estimated / rows:.2%} of the labels",
        ),
        ("candidates", f"{found:,}", "a quarter more, where so many are contradicted"),
        ("accuracy", f"{issues.accuracy:.4f}", "against the given labels, out of fold"),
    ]
    notes = [
        paragraph(
            "Every row was judged by a network that did not learn from it. Nothing was changed: a candidate is a proposal.",
            "note",
        ),
        paragraph(
            "The lower the accuracy, the more of the candidates are the networks' own mistakes.",
            "note",
        ),
    ]
    return PageSection("Headline", join([tiles(boxes), *notes]))


def _candidates(issues: LabelIssues, inputs: Inputs, contract: InputContract) -> PageSection:
    shown = issues.candidates[:_MOST_SHOWN].tolist()
    if not shown:
        return PageSection("Candidates", paragraph(f"None among {len(issues.ids):,} rows.", "good"))
    has_pixels = input_kind(contract.kind).has_pixels
    drawn = (
        _cells(issues, inputs, contract, shown)
        if not has_pixels
        else _pictures(issues, inputs, shown)
    )
    seen = ", as the network sees them" if has_pixels else ""
    many = (
        f"{len(shown):,} of {len(issues.candidates):,}"
        if len(shown) < len(issues.candidates)
        else f"All {len(shown):,}"
    )
    note = f"{many} candidates, the least probable label first{seen}. All rows are in {_ROWS_FILE}."
    return PageSection("Candidates", join([drawn, paragraph(note, "note")]))


def _pictures(issues: LabelIssues, inputs: Inputs, rows: Sequence[int]) -> Html:
    return gallery(
        figure(
            image(inputs[row], issues.sources[row]),
            _proposal(issues, row),
            f"{_probabilities(issues, row)}, {issues.sources[row]}",
        )
        for row in rows
    )


def _cells(
    issues: LabelIssues, inputs: Inputs, contract: InputContract, rows: Sequence[int]
) -> Html:
    columns, cells, numbers = shown_cells(contract, [inputs[row] for row in rows])
    lines = [
        [_proposal(issues, row), _probabilities(issues, row), issues.sources[row], *texts]
        for row, texts in zip(rows, cells, strict=True)
    ]
    return table(["label", "probability", "row", *columns], lines, numeric=numbers)


def _proposal(issues: LabelIssues, row: int) -> str:
    given, suggested = issues.classes[issues.given[row]], issues.classes[issues.suggested[row]]
    return f"{given}, rather {suggested}"


def _probabilities(issues: LabelIssues, row: int) -> str:
    return f"{issues.quality[row]:.1%} against {issues.confidence[row]:.1%}"


def _where(issues: LabelIssues) -> PageSection:
    pairs = [
        [given, suggested, f"{count:,}"] for given, suggested, count in issues.pairs()[:_MOST_PAIRS]
    ]
    order = sorted(
        issues.class_counts().items(),
        key=lambda entry: (-entry[1][1] / max(entry[1][0], 1), entry[0]),
    )
    classes = [
        [name, f"{rows:,}", f"{found:,}", f"{found / max(rows, 1):.1%}"]
        for name, (rows, found) in order[:_MOST_CLASSES]
    ]
    parts = [
        table(["label", "rather", "candidates"], pairs, numeric=["candidates"])
        if pairs
        else paragraph("No pair of classes.", "good"),
        table(
            ["label", "rows", "candidates", "share"],
            classes,
            numeric=["rows", "candidates", "share"],
        ),
    ]
    return PageSection("Candidates by class", beside(parts))


def _folds(issues: LabelIssues) -> PageSection:
    counts = [int((issues.folds == fold).sum()) for fold in range(len(issues.fold_accuracies))]
    rows = [
        [str(fold), f"{counts[fold]:,}", f"{accuracy:.4f}"]
        for fold, accuracy in enumerate(issues.fold_accuracies)
    ]
    return PageSection(
        "Folds", table(["fold", "rows", "accuracy"], rows, numeric=["rows", "accuracy"])
    )
