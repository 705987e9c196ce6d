"""split: assigns every kept row to a split and proves that nothing leaks between splits."""

from pathlib import Path

from slipway.artifacts.locations import CLEAN, SPLIT
from slipway.config.params import Params
from slipway.config.stage_run import run_stage
from slipway.data.engine.rows import PURGED, ROWS, SPLIT_ROWS, read_table, write_table
from slipway.data.splits.report import report, summary
from slipway.data.splits.split import check_columns, split_rows
from slipway.data.tables.target_copies import score_columns, score_report
from slipway.kinds.registry import kind_of
from slipway.reports.pages.split_page import split_page
from slipway.system import files

REPORT = Path("reports/split.json")
PAGE = Path("reports/split.html")


def run(params: Params) -> None:
    """Split the clean rows; DataError for an empty split, a missing class, or a leak."""
    rows = read_table(CLEAN / "rows.parquet", ROWS)
    check_columns(rows, params.data.split_column, params.data.time_column)
    several = kind_of(params.data.task).target.several
    split = split_rows(rows, params.split, params.seed, several=several)
    scores = score_columns(split.rows, CLEAN)
    described = report(split, params.seed) | score_report(scores, of_classes=split.has_classes)
    with files.new_directory(SPLIT) as folder:
        write_table(folder / "rows.parquet", split.rows, SPLIT_ROWS)
        write_table(folder / "purged.parquet", split.purged, PURGED)
    files.write_json(REPORT, described)
    files.write_text(PAGE, split_page(described))
    print(summary(described))


if __name__ == "__main__":
    run_stage(run)
