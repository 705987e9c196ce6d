"""From a JSON body to the vectors a network takes: one row, or several, checked by the bundle's own column contract.

All bad cells of a request are found in one pass; the answer names the first by row and column, and tells of the others.
A bad row refuses its whole request, and no row of it reaches the model.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any

from serving.http.responses import Refusal
from serving.http.strict_json import may_exceed, parse
from serving.requests.decoding import Decoded
from serving.requests.reading import ACCEPTED_ROWS
from slipway.inputs.columns import (
    Cell,
    ColumnContract,
    encode_rows,
    listed_rows,
    read_cell,
    read_row,
)
from slipway.system.errors import CellError

INLINE_BYTES = (
    4 << 10
)  # a longer body is read on a thread: it would hold up the event loop for milliseconds
MAX_FAULTS = 100  # are found; after so many it is enough
_SHOWN_FAULTS = 3  # are named, beside the first
_SPARE_VALUES = (
    1024  # beyond what the rows can hold, so that unknown columns are named and not only counted
)


class RowDecoder:
    """Reads rows for one contract: short bodies at once, others on a thread."""

    def __init__(self, contract: ColumnContract, max_rows: int) -> None:
        self._contract = contract
        self._max_rows = max_rows
        self._threads = ThreadPoolExecutor(
            1, thread_name_prefix="slipway-rows"
        )  # parsing holds the interpreter's lock

    def reader(self, items: Sequence[bytes]) -> None:
        """Rows are counted and checked before they join a batch."""

    async def decode(self, *items: bytes) -> Decoded:
        """(rows, width) float32; Refusal naming the first fault, with `field` as "age" or "rows[3].age"."""
        payload = items[0]
        if len(payload) <= INLINE_BYTES:
            return self._decode(payload)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._decode, payload
        )

    def close(self) -> None:
        """End the thread. What is left to it nobody waits for, and it may take seconds: neither does the event loop."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _decode(self, payload: bytes) -> Decoded:
        self._require_few_values(payload)
        content = parse(payload)
        rows, is_list = self._rows(content)
        faults: list[tuple[int, CellError]] = []
        cells = []
        for position, row in enumerate(rows):
            # Faults are looked for behind `except`: inside, each would have the first one as its context, and that has these rows.
            with suppress(CellError):
                cells.append(read_row(row, self._contract))
                continue
            found = islice(cell_faults(row, self._contract), MAX_FAULTS - len(faults))
            faults += [(position, fault) for fault in found]
            if len(faults) == MAX_FAULTS:
                break
        if not faults:
            with suppress(CellError):  # it cannot say in which row
                return Decoded(encode_rows(cells, self._contract), is_list)
            faults = list(islice(_too_large(cells, self._contract), MAX_FAULTS))
        raise _refusal(faults, is_list)

    def _require_few_values(self, payload: bytes) -> None:
        width = len(self._contract.accepted)
        if may_exceed(payload, (self._max_rows + 1) * (width + 4) + _SPARE_VALUES):
            message = f"the body has more values than {self._max_rows} rows of {width} columns can have; {self._hint}"
            raise Refusal("too_many_rows", message)

    def _rows(self, content: Any) -> tuple[list[Mapping[str, Any]], bool]:
        """The rows, and whether they came in a list; Refusal if the body has another form."""
        if not isinstance(content, dict):
            raise Refusal("not_a_row", f"the body is {_kind(content)}; {ACCEPTED_ROWS}")
        rows = listed_rows(content)
        if rows is None:
            return [content], False
        if not rows:
            raise Refusal(
                "no_rows", "the list of rows is empty, expected at least one row", field="rows"
            )
        if len(rows) > self._max_rows:
            raise Refusal(
                "too_many_rows",
                f"there are {len(rows)} rows in one request, the limit is {self._max_rows}; {self._hint}",
                field="rows",
            )
        for position, row in enumerate(rows):
            if not isinstance(row, dict):
                raise Refusal(
                    "not_a_row",
                    f"row {position} is {_kind(row)}, expected an object of columns",
                    field=f"rows[{position}]",
                )
        return rows, True

    @property
    def _hint(self) -> str:
        return "send fewer rows in each request (SLIPWAY_MAX_ROWS)"


def cell_faults(row: Mapping[str, Any], contract: ColumnContract) -> Iterator[CellError]:
    """Everything that is wrong with a row: unknown columns first, then cell by cell in the contract's order."""
    for name in row:
        if name not in contract.accepted:
            try:
                read_row({name: None}, contract)
            except CellError as error:
                yield error.with_traceback(None)  # whose frames lead back to the list of faults
    for column in contract.columns:
        try:
            read_cell(row.get(column.name), column)
        except CellError as error:
            yield error.with_traceback(None)


def _too_large(
    rows: list[dict[str, Cell]], contract: ColumnContract
) -> Iterator[tuple[int, CellError]]:
    for position, row in enumerate(rows):
        try:
            encode_rows([row], contract)
        except CellError as error:
            yield position, error.with_traceback(None)


def _refusal(faults: list[tuple[int, CellError]], is_list: bool) -> Refusal:
    """The first fault, and what else there is."""
    places = [
        f"rows[{position}].{fault.column}" if is_list else fault.column
        for position, fault in faults
    ]
    first = faults[0][1]
    others = [
        f"{place} ({fault.rule})" for place, (_, fault) in zip(places[1:], faults[1:], strict=True)
    ]
    message = f"{places[0]}: {first.detail}"
    if others:
        count = f"At least {len(others)}" if len(faults) == MAX_FAULTS else str(len(others))
        message += f". {count} more: {', '.join(others[:_SHOWN_FAULTS])}{', ...' * (len(others) > _SHOWN_FAULTS)}"
    return Refusal(first.rule, message, field=places[0])


def _kind(content: Any) -> str:
    """What JSON calls it."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(content), "a number")
