"""Decodes encoded rows to readable text.

A number is shown with the digits that its float32 encoding preserved.
"""

import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from numpy.typing import NDArray

from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.texts import TextContract, decode_row

MISSING = "missing"
_SHOWN_CHARACTERS = 200  # of a text
_FLOAT32_STEP = 2.0**-23  # between neighbours, relative


def column_cells(
    contract: ColumnContract, rows: Sequence[NDArray[Any]]
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return the column names, the texts of each row in that order, and the numeric columns."""
    names = [column.name for column in contract.columns]
    found = [read_cells(row, contract) for row in rows]
    numbers = [column.name for column in contract.columns if column.kind == "number"]
    return names, [[cells[name] for name in names] for cells in found], numbers


def read_cells(row: NDArray[Any], contract: ColumnContract) -> dict[str, str]:
    """Return the text of each column, in the contract's order.

    `row` is (width,) float32 as `slipway.inputs.columns.encode` lays it out.
    """
    num_values, num_indicators = len(contract.numeric), len(contract.indicated)
    flags = row[num_values : num_values + num_indicators]
    codes = row[num_values + num_indicators :]
    missing = {column.name for column, flag in zip(contract.indicated, flags, strict=True) if flag}
    cells = {
        column.name: MISSING if column.name in missing else number_text(float(value), column)
        for column, value in zip(contract.numeric, row[:num_values], strict=True)
    }
    for column, code in zip(contract.categorical, codes, strict=True):
        cells[column.name] = column.categories[int(code) - 1] if code else f"{MISSING} or unknown"
    return {column.name: cells[column.name] for column in contract.columns}


def number_text(standardised: float, column: Column) -> str:
    """Return the text of a number, a boolean or a date, from its value in the encoded row."""
    number = standardised * column.std + column.mean
    if column.kind == "boolean":
        return "true" if number > 0.5 else "false"
    if column.kind == "date":
        return _date(number)
    resolution = max(abs(standardised), _FLOAT32_STEP) * column.std * _FLOAT32_STEP
    rounded = round(number, -math.ceil(math.log10(resolution)))
    return f"{rounded + 0.0:.7g}"  # + 0.0 turns -0.0 into 0.0


def _date(days: float) -> str:
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=days)).date().isoformat()
    except OverflowError:
        return f"{days:.7g} days since 1970"


def text_cells(
    contract: TextContract, rows: Sequence[NDArray[Any]]
) -> tuple[list[str], list[list[str]], list[str]]:
    """Return one column, named after all text columns, with each row's text; it is not numeric."""
    texts = [[_shortened(decode_row(row, contract))] for row in rows]
    return [" + ".join(contract.columns)], texts, []


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
