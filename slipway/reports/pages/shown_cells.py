"""Rows of an input without pixels as texts, for the tables of reports."""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind

Cells = tuple[list[str], list[list[str]], list[str]]


def shown_cells(contract: InputContract, rows: Sequence[NDArray[Any]]) -> Cells:
    """Return the names of the columns, the texts of each row, and the names of numeric columns."""
    read: Callable[[InputContract, Sequence[NDArray[Any]]], Cells]
    read = input_kind(contract.kind).load_part("row_cells")
    return read(contract, rows)
