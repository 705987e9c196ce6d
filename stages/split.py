"""Gives every kept row its split, and proves that nothing leaks from one into another."""

from pathlib import Path

from slipway import files
from slipway.command import run_stage
from slipway.data import splitting
from slipway.data.rows import ROWS, SPLIT_ROWS, read_table, write_table
from slipway.params import Params

CLEAN = Path("data/clean")
SPLIT = Path("data/split")
REPORT = Path("reports/split.json")


def run(params: Params) -> None:
    """Split the clean rows; DataError when a split or a class in it is empty, or when there is a leak."""
    rows = read_table(CLEAN / "rows.parquet", ROWS)
    table = splitting.split_rows(rows, params.split, params.seed)
    leaks = splitting.find_leaks(table)
    splitting.check_leaks(leaks)
    report = splitting.report(table, params.seed, leaks)
    with files.new_directory(SPLIT) as folder:
        write_table(folder / "rows.parquet", table, SPLIT_ROWS)
    files.write_json(REPORT, report)
    print(", ".join(f"{name} {split['rows']}" for name, split in report["splits"].items()))


if __name__ == "__main__":
    run_stage(run)
