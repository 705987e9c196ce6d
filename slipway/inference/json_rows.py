"""Converts rows of a table to cells that JSON can represent."""

from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with plain Python cells: no NumPy scalars, and None for NaN and NaT."""
    return {name: plain_cell(cell) for name, cell in row.items()}


def plain_cell(cell: Any) -> Any:
    """Return None for NaN, NaT and NA, and a plain number, text or date for any other cell."""
    if isinstance(cell, np.datetime64):
        cell = cell.astype("datetime64[us]").item()
    elif isinstance(cell, np.generic):
        cell = cell.item()
    elif isinstance(cell, Decimal):
        cell = float(cell)
    try:
        return None if cell != cell else cell
    except TypeError:  # pandas.NA has no truth
        return None
    except ValueError:  # an array has none either, and is refused as a cell
        return cell


def json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for `json.dumps`: as `plain_row`, with dates as ISO 8601 text."""
    return {
        name: cell.isoformat() if isinstance(cell, date) else cell
        for name, cell in plain_row(row).items()
    }
