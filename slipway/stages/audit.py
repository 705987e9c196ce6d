"""audit: finds probably wrong labels in train and val if `audit.folds` is set; changes none."""

from pathlib import Path

from slipway.artifacts.locations import AUGMENTED, PACKED, SPLIT
from slipway.config.params import Params
from slipway.config.stage_run import run_stage
from slipway.data.engine.rows import SPLIT_ROWS, read_table
from slipway.data.engine.work_folder import work_folder
from slipway.data.splits.audit_folds import audited_rows
from slipway.reports.evaluation.label_issues import LabelIssues, judge, report, write_rows
from slipway.reports.pages.label_issues_page import label_issues_page, page_of_no_audit
from slipway.system import files

WORK = Path(".work/audit")
REPORT = Path("reports/label_issues.json")
PAGE = Path("reports/label_issues.html")
ROWS = Path("reports/label_issues.parquet")


def run(params: Params) -> None:
    """Audit the labels, or record that audit.folds is null."""
    if params.audit.folds:
        _audit(params)
        return
    _write(None, {"folds": 0}, page_of_no_audit())


def _audit(params: Params) -> None:
    from slipway.training.uncertainty.out_of_fold import plan_folds, predict_out_of_fold

    rows = audited_rows(read_table(SPLIT / "rows.parquet", SPLIT_ROWS))
    training = plan_folds(
        params.seed,
        params.train,
        params.audit,
        rows,
        packed=PACKED,
        augmented=AUGMENTED,
        root=Path(),
    )
    with work_folder(WORK, training.key, "an audit") as folder:
        probabilities = predict_out_of_fold(training, folder)
        packed, manifest = training.rows(), training.data.manifest
        given = packed.targets.astype("int64")
        judgement, splits = judge(given, probabilities), rows["split"].to_pylist()
        issues = LabelIssues(
            manifest.classes,
            packed.ids,
            packed.sources,
            splits,
            training.folds,
            given,
            probabilities,
            judgement,
        )
        about = (
            f"{params.train.network}, {params.audit.folds} folds, {params.audit.epochs} epochs "
            "each; test rows are left out"
        )
        page = label_issues_page(issues, packed.inputs, manifest.input, about)
        _write(issues, training.settings(), page)
    print(
        f"{len(issues.candidates):,} of {len(issues.ids):,} labels are probably wrong "
        f"(out-of-fold accuracy {issues.accuracy:.4f}); none was changed; see {PAGE}"
    )


def _write(issues: LabelIssues | None, settings: dict[str, object], text: str) -> None:
    files.write_json(REPORT, report(issues, settings))
    write_rows(ROWS, issues)
    files.write_text(PAGE, text)


if __name__ == "__main__":
    run_stage(run)
