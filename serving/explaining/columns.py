"""Which columns of a row mattered: how the answer changes when they are set to what is usual.

What is usual is the example row of `/model`: the median of a number or date, the commoner truth value, the commonest category.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serving.api_docs.description import example_row
from slipway.inputs.columns import ColumnContract, encode_rows, read_row


def usual_vector(contract: ColumnContract) -> NDArray[np.float32]:
    """(width,) float32: the example row, encoded."""
    vector: NDArray[np.float32] = encode_rows(
        [read_row(example_row(contract), contract)], contract
    )[0]
    return vector


def positions_of(contract: ColumnContract) -> list[list[int]]:
    """For each of the contract's columns, where in the encoded row it is: its value and indicator, or its code."""
    names, indicated = contract.layout.names, [column.name for column in contract.indicated]
    categories = [column.name for column in contract.categorical]
    positions = []
    for column in contract.columns:
        if column.kind == "category":
            positions.append([len(names) + len(indicated) + categories.index(column.name)])
        else:
            indicator = (
                [len(names) + indicated.index(column.name)] if column.name in indicated else []
            )
            positions.append([names.index(column.name), *indicator])
    return positions


def distances(
    vector: NDArray[np.float32], usual: NDArray[np.float32], positions: Sequence[Sequence[int]]
) -> NDArray[np.float32]:
    """(columns,) how far each column is from what is usual, in the encoded row's own numbers; 0 where it is the same."""
    return np.array(
        [np.abs(vector[places] - usual[places]).max() for places in positions], dtype=np.float32
    )


def blended(
    vector: NDArray[np.float32],
    usual: NDArray[np.float32],
    positions: Sequence[Sequence[int]],
    given: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """(rows, width): the usual row, with those of the columns in `positions` that `given` (rows, columns) names as they are in `vector`."""
    rows = np.repeat(vector[np.newaxis], len(given), axis=0)
    for number, places in enumerate(positions):
        rows[np.ix_(~given[:, number], np.array(places))] = usual[places]
    return rows
