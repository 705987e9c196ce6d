"""Cleans damaged copies of a table, each with one flipped bit, in a separate process.

`python -m tests.data.bit_flips FILE COUNT SEED` prints the number of results and of DataErrors;
any other error ends it. Every row of a copy that can be read must be accounted for.
"""

import csv
import random
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from slipway.data.sources.raw_tables import read_raw_table
from slipway.data.tables.clean_step import table_report
from slipway.data.tables.cleaning import clean_table
from slipway.system.errors import DataError
from tests.data.raw_files import data_params
from tests.project_params import clean_params


def outcome(path: Path) -> str:
    """Return `result` or `error` for a copy; raises AssertionError if rows are lost."""
    data, clean = (
        data_params(path),
        clean_params(rules={"type_violation": "flag", "outlier": None}),
    )
    try:
        raw = read_raw_table(path)
        table = clean_table(raw, data, clean)
    except DataError:
        return "error"
    cleaned = table.cleaned
    assert raw.num_read == num_records(path)
    assert cleaned.rows.num_rows + cleaned.quarantine.num_rows == cleaned.num_read
    if cleaned.rows.num_rows:
        table_report(table, data, clean)
    return "result"


def num_records(path: Path) -> int:
    """Count the rows with a different reader."""
    if path.suffix != ".csv":
        return int(pq.read_metadata(path).num_rows)
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        return sum(bool(row) for row in csv.reader(file)) - 1


def main(source: Path, count: int, seed: int) -> Counter[str]:
    """Count the outcomes for `count` damaged copies, which are written beside `source`."""
    generator = random.Random(seed)
    content = source.read_bytes()
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        damaged = bytearray(content)
        damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        copy = source.with_name(f"damaged{source.suffix}")
        copy.write_bytes(damaged)
        outcomes[outcome(copy)] += 1
    return outcomes


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    print(found["result"], found["error"])
