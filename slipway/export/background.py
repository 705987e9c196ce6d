"""Chooses the rows of the training data that explanations compare a row with.

The packed store has them as inputs of the network. They are decoded, because the bundle holds rows
as callers write them, and the page shows the first of them.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.data.engine.randomness import drawn_order
from slipway.data.store.packed import PackedSplit
from slipway.inputs.columns import Column, ColumnContract, positions_of, read_row
from slipway.inputs.contract import InputContract
from slipway.system.errors import CellError

_MOST_ANSWERED = 4096  # training rows, from which the background is drawn
_MOST_DIGITS = 17  # of a float64


def with_background(
    contract: ColumnContract,
    split: PackedSplit,
    num_rows: int,
    seed: int,
    answer: Callable[[NDArray[Any]], NDArray[np.float32]],
) -> ColumnContract:
    """Return the contract with at most `num_rows` training rows, the most typical one first.

    `answer` gives the model's outputs (rows, K) for inputs. The rows are drawn evenly along these
    (systematic sampling), so that their mean answer is close to that of all rows. Their order is
    random, because a slow model uses only the first ones.
    """
    num_rows = min(num_rows, len(split))
    if not num_rows:
        return contract
    drawn = drawn_order(seed, 0, split.keys, "background")[:_MOST_ANSWERED]
    outputs = answer(np.array(split.inputs[drawn], np.float32))
    along = np.lexsort((outputs.max(axis=1), outputs.argmax(axis=1)))  # positions in `drawn`
    every = np.sort(along[(2 * np.arange(num_rows) + 1) * len(drawn) // (2 * num_rows)])
    inputs = np.array(split.inputs[drawn[every]], np.float32)
    first = _most_typical(inputs)
    order = [first, *(row for row in range(num_rows) if row != first)]
    rows = [row for row in decoded_rows(inputs[order], contract) if _is_valid(row, contract)]
    return contract.model_copy(update={"background": rows})


def background_note(contract: InputContract) -> str:
    """Return text that states how many training rows a bundle holds; "" if it holds none."""
    num_rows = len(contract.background) if isinstance(contract, ColumnContract) else 0
    return (
        f"holds     {num_rows} rows of the training data, readable in bundle.json: explanations "
        "compare with them, and the page shows one.\n"
        "          `slipway set export.background_rows=0` leaves them out"
    ) * bool(num_rows)


def decoded_rows(inputs: NDArray[np.float32], contract: ColumnContract) -> list[dict[str, Any]]:
    """Decode inputs (rows, width) to rows that the contract encodes to the same inputs.

    Numbers have as few digits as that needs, dates with times are rounded to minutes.
    """
    places = list(zip(contract.columns, positions_of(contract), strict=True))
    return [{column.name: _cell(row[at], column) for column, at in places} for row in inputs]


def _is_valid(row: dict[str, Any], contract: ColumnContract) -> bool:
    """Return False if callers could not send this row: a required cell has a rare category."""
    try:
        read_row(row, contract)
    except CellError:
        return False
    return True


def _cell(values: NDArray[np.float32], column: Column) -> Any:
    """Return a cell from the value of a column and perhaps its indicator of a missing value."""
    value = float(values[0])
    if column.kind == "category":
        return column.categories[int(value) - 1] if value else None
    if len(values) > 1 and values[1]:
        return None
    number = value * column.std + column.mean
    if column.kind != "number":
        return column.model_copy(update={"fill": number}).example()
    size = -math.floor(math.log10(column.std))
    for decimals in range(size - _MOST_DIGITS, size + _MOST_DIGITS):  # 0 is in the data, not 7e-09
        short = round(number, decimals)
        if np.float32((short - column.mean) / column.std) == values[0]:
            number = short
            break
    low = -np.inf if column.min is None else column.min
    high = np.inf if column.max is None else column.max
    number = float(np.clip(number, low, high))
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def _most_typical(inputs: NDArray[np.float32]) -> int:
    """Return the row that differs least from the others; a column differs by at most 1."""
    distances = np.abs(inputs[:, np.newaxis] - inputs[np.newaxis]).clip(max=1)
    return int(distances.sum(axis=(1, 2)).argmin())
