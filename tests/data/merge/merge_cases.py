"""Base and collected data for tests of the merge."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.data.merge.new_rows import MergeReport
from tests.data.raw_files import write_csv


def counts(report: MergeReport) -> tuple[int, int, int, int]:
    return report.num_base, report.num_added, report.num_duplicates, report.num_relabelled


def write_base_table(path: Path, num_rows: int = 30, stored: str = "csv") -> Path:
    """Inputs a, colour and yes; a constant, a twin of a, a row index, and the target."""
    rows = [
        {
            "": str(row), "a": f"{(7 * row) % 31}.5",
            "colour": ("red", "blue")[row % 7 < 3], "yes": ("yes", "no")[row % 3 == 0], "same": "x",
            "twin": f"{(7 * row) % 31}.50", "label": ("1", "2")[row % 2],
        }
        for row in range(num_rows)
    ]  # fmt: skip
    if stored == "csv":
        return write_csv(
            path, "\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n"
        )
    typed = [
        row
        | {
            "a": float(row["a"]),
            "twin": float(row["twin"]),
            "yes": row["yes"] == "yes",
            "label": int(row["label"]),
        }
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(typed), path)
    return path


def write_collected_table(path: Path) -> Path:
    """Write typed inputs in the format of `slipway.traffic.collect`; row 0 equals a base row."""
    columns = {
        "a": [0.5, 100.25, None],
        "colour": ["blue", "red", "blue"],
        "yes": [False, True, True],
    }
    pq.write_table(pa.table(columns | {"label": ["1", "2", "1"]}), path)
    return path
