"""Replaces columns of a row by those of a baseline row, to measure their effect on the answer.

The baseline row has typical values: the median of each number or date, the more frequent boolean,
and the most frequent category. `GET /model` shows the same row as an example.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipway.inputs.columns import ColumnContract, encode_rows, read_row


def baseline_vector(contract: ColumnContract) -> NDArray[np.float32]:
    """Return the encoded baseline row, (width,) float32."""
    row = read_row(contract.example_row(), contract)
    vector: NDArray[np.float32] = encode_rows([row], contract)[0]
    return vector


def distances(
    vector: NDArray[np.float32], baseline: NDArray[np.float32], positions: Sequence[Sequence[int]]
) -> NDArray[np.float32]:
    """Return the distance of each column from the baseline in encoded units, (columns,)."""
    return np.array(
        [np.abs(vector[places] - baseline[places]).max() for places in positions], dtype=np.float32
    )


def blended(
    vector: NDArray[np.float32],
    baseline: NDArray[np.float32],
    positions: Sequence[Sequence[int]],
    given: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """Return copies of `vector`, (rows, width), with some columns replaced by the baseline's.

    `given` (rows, columns) is True for each column of `positions` that stays. Columns that
    `positions` lacks stay as well.
    """
    rows = np.repeat(vector[np.newaxis], len(given), axis=0)
    for number, places in enumerate(positions):
        rows[np.ix_(~given[:, number], np.array(places))] = baseline[places]
    return rows
