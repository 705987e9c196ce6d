"""Measures the time of `clean` on tables of several sizes.

`python -m bench.tables` writes CSV and Parquet files of 10 columns with planted faults. It runs the
stage's work on them (reading, cleaning, report and files), the sizes interleaved, and prints and
writes one table. For comparison it shows the time in which pyarrow reads the same file into typed
columns, the minimum for any tool.
"""

import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from bench.conditions import conditions
from slipway.config.params import load_params
from slipway.config.sections import CleanParams, DataParams
from slipway.data.engine.rows import QUARANTINE, ROWS, write_table
from slipway.data.sources.raw_tables import read_raw_table
from slipway.data.tables.clean_files import TableColumns, write_cells
from slipway.data.tables.clean_step import table_report
from slipway.data.tables.cleaning import clean_table
from slipway.system import files

ROOT = Path.cwd()
SCRATCH = ROOT / "tmp" / "bench" / "tables"
RESULT = ROOT / "bench/results/tables.md"
SIZES = (10_000, 100_000, 1_000_000)
PARQUET_ROWS = 100_000
ROUNDS = 5
PLANTED = 1_000  # rows for each planted fault: a text in a number column, and a missing cell
COLUMNS = (
    "Rows x columns",
    "Format",
    "Clean, median (min to max)",
    "Of it on a core",
    "Rows per core second",
    "pyarrow reads it in",
    "Bad cells planted, named",
)


def make_table(num_rows: int, seed: int = 3) -> pa.Table:
    """Make a faulty text table: five numbers, a count, a category, a boolean, a date, a target."""
    generator = np.random.default_rng(seed)
    numbers = {
        f"number_{index}": generator.normal(50, 10, num_rows).round(4).astype(str).astype(object)
        for index in range(5)
    }
    numbers["number_0"][::PLANTED] = "unknown"
    numbers["number_1"][1::PLANTED] = ""
    days = np.datetime64("2020-01-01") + generator.integers(0, 2000, num_rows)
    columns = numbers | {
        "count": generator.integers(0, 1000, num_rows).astype(str),
        "town": generator.choice([f"town {index}" for index in range(200)], num_rows),
        "owned": generator.choice(["yes", "no"], num_rows),
        "built": days.astype(str),
        "price": generator.normal(2e5, 5e4, num_rows).round(2).astype(str),
    }
    return pa.table(
        {name: pa.array(values.tolist(), pa.string()) for name, values in columns.items()}
    )


def clean(path: Path, data: DataParams, params: CleanParams) -> int:
    """Run the stage's work after its imports. Returns the number of bad cells."""
    table = clean_table(read_raw_table(path), data, params)
    with files.new_directory(SCRATCH / "clean") as folder:
        write_table(folder / "rows.parquet", table.cleaned.rows, ROWS)
        write_table(folder / "quarantine.parquet", table.cleaned.quarantine, QUARANTINE)
        write_cells(
            folder,
            table.cells,
            TableColumns(inputs=table.types, ignored=table.ignored),
            table.ledger.bad_cell_table(),
        )
    table_report(table, data, params)
    rules: list[str] = table.ledger.bad_cell_table()["rule"].to_pylist()
    return rules.count("type_violation")


def main() -> None:
    """Measure all sizes and formats, interleaved, and write the table."""
    params = load_params(ROOT / "params.yaml")
    data = params.data.model_copy(update={"task": "table_regression", "target_column": "price"})
    SCRATCH.mkdir(parents=True, exist_ok=True)
    paths: dict[Path, int] = {}
    for size in SIZES:
        table = make_table(size)
        pyarrow.csv.write_csv(
            table, SCRATCH / f"{size}.csv", pyarrow.csv.WriteOptions(quoting_style="none")
        )
        paths[SCRATCH / f"{size}.csv"] = size
    pq.write_table(
        pyarrow.csv.read_csv(SCRATCH / f"{PARQUET_ROWS}.csv"), SCRATCH / f"{PARQUET_ROWS}.parquet"
    )
    paths[SCRATCH / f"{PARQUET_ROWS}.parquet"] = PARQUET_ROWS
    seconds: dict[Path, list[float]] = {path: [] for path in paths}
    busy: dict[Path, list[float]] = {path: [] for path in paths}
    reading: dict[Path, list[float]] = {path: [] for path in paths}
    named = {}
    for _ in range(ROUNDS):
        for path in paths:
            begin, begin_busy = time.perf_counter(), time.process_time()
            named[path] = clean(path, data, params.clean)
            seconds[path].append(time.perf_counter() - begin)
            busy[path].append(time.process_time() - begin_busy)
            read = pyarrow.csv.read_csv if path.suffix == ".csv" else pq.read_table
            begin = time.perf_counter()
            read(path)
            reading[path].append(time.perf_counter() - begin)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += [
        _line(path, size, seconds[path], busy[path], reading[path], named[path])
        for path, size in paths.items()
    ]
    text = "\n".join(lines)
    print(text)
    note = (
        f"n = {ROUNDS} interleaved rounds in one process, which writes everything that `clean` "
        f"writes. {conditions('pyarrow', 'numpy')}"
    )
    files.write_text(RESULT, f"# Cleaning tables\n\n{text}\n\n{note}\n")
    shutil.rmtree(SCRATCH)


def _line(
    path: Path, size: int, seconds: list[float], busy: list[float], reading: list[float], named: int
) -> str:
    median = statistics.median(seconds)
    cells = [
        f"{size:,} x 10",
        path.suffix[1:],
        f"{median:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})",
        f"{statistics.median(busy):.2f} s",
        f"{size / statistics.median(busy):,.0f}",
        f"{statistics.median(reading):.2f} s",
        f"{-(-size // PLANTED)}, {named}",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
