"""Shows single rows on a page: as pictures with captions, or as lines of a table."""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from slipway.data.store.packed import Inputs
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind
from slipway.reports.pages.html_page import Html, figure, gallery, image, table

# Names of the columns, the texts of each row, and the names of the numeric columns.
Cells = tuple[list[str], list[list[str]], list[str]]


def exhibits(
    inputs: Inputs,
    contract: InputContract,
    columns: Sequence[str],
    shown: Sequence[tuple[int, Sequence[str]]],
) -> Html:
    """Show rows of `inputs` (N, ...), as `contract` describes them, each with texts.

    For images, the first text is the caption and the others are small print. For tables, the texts
    are in `columns`, before the row's own cells. The last text should identify the row.
    """
    kind = input_kind(contract.kind)
    if kind.has_pixels:
        return gallery(
            figure(image(inputs[row], details[-1]), caption, ", ".join(details))
            for row, (caption, *details) in shown
        )
    read: Callable[[InputContract, Sequence[NDArray[Any]]], Cells] = kind.load_part("row_cells")
    names, cells, numeric = read(contract, [inputs[row] for row, _ in shown])
    lines = [[*texts, *found] for (_, texts), found in zip(shown, cells, strict=True)]
    return table([*columns, *names], lines, numeric=numeric)
