"""Small tables on disk, and sections `data` that name their columns."""

from pathlib import Path
from typing import Any

from slipway.config.sections import ColumnParams, DataParams
from slipway.data.tables.cleaning import CleanedTable, clean_table
from slipway.data.tables.source import read_table_of
from tests.project_params import PROJECT, clean_params


def data_params(
    path: Path, task: str = "table_regression", target: str = "target", **changes: Any
) -> DataParams:
    """Return the section `data` for a table."""
    values = {"path": str(path), "task": task, "target_column": target}
    return DataParams.model_validate(PROJECT.data.model_dump() | values | changes)


def said(kind: str, **changes: Any) -> ColumnParams:
    """Return an entry of `data.columns` for a column of this kind."""
    return ColumnParams.model_validate(
        {"kind": kind, "min": None, "max": None, "required": False} | changes
    )


def write_csv(path: Path, text: str | bytes) -> Path:
    """Write a file with exactly this text."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def numbered_csv(path: Path, num_rows: int = 30, **cells: str) -> Path:
    """Write a CSV with columns a, b and target of different numbers.

    A keyword such as `a_3="x"` replaces the cell in row 3 of column a.
    """
    rows = [
        {"a": f"{(7 * row) % 31}.5", "b": f"{(11 * row) % 37}", "target": f"{(5 * row) % 29}"}
        for row in range(num_rows)
    ]
    for place, cell in cells.items():
        name, _, row = place.partition("_")
        rows[int(row)][name] = cell
    lines = ["a,b,target", *(",".join(row.values()) for row in rows)]
    return write_csv(path, "\n".join(lines) + "\n")


def cleaned(data: DataParams, **changes: Any) -> CleanedTable:
    """Return the table, cleaned with the project's params and some changes of the section clean."""
    return clean_table(read_table_of(data), data, clean_params(**changes))


def refusals(table: CleanedTable) -> dict[str, tuple[str, str]]:
    """Return the rule and the detail of each refused row, by source."""
    return {
        row["source"]: (row["rule"], row["detail"]) for row in table.cleaned.quarantine.to_pylist()
    }
