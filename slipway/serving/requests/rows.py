"""Decodes JSON rows, of a table or of texts, to network inputs, and checks them.

The bundle's contract defines the checks. One pass finds all bad cells of a request; the error shows
the first by row and column, and counts the others. A request with a bad row is refused as a whole:
none of its rows reaches the model.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from slipway.inputs.columns import (
    Cell,
    ColumnContract,
    encode_rows,
    read_cell,
    read_row,
)
from slipway.inputs.contract import listed_rows
from slipway.inputs.texts import TextContract, encode_texts, read_text, text_faults
from slipway.serving.http.responses import Refusal
from slipway.serving.http.strict_json import may_exceed, parse
from slipway.serving.requests.bodies import ACCEPTED_ROWS
from slipway.serving.requests.decoding import Decoded
from slipway.system.errors import CellError

RowContract = TypeVar("RowContract", ColumnContract, TextContract)
INLINE_BYTES = 4 << 10  # longer bodies would block the event loop for milliseconds
MAX_FAULTS = 100  # number of faults at which the search stops
_SHOWN_FAULTS = 3  # faults that the error names besides the first
# Beyond the largest valid body, so that unknown columns are named and not only counted.
_SPARE_VALUES = 1024
_FEWER_ROWS = "send fewer rows in each request (SLIPWAY_MAX_ROWS)"


class JsonDecoder(ABC, Generic[RowContract]):
    """Decodes JSON rows for one contract: short bodies inline, others on a thread."""

    def __init__(self, contract: RowContract, max_rows: int) -> None:
        self._contract: RowContract = contract
        self._max_rows = max_rows
        # One thread, because parsing holds the interpreter's lock.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="slipway-rows")

    @abstractmethod
    def encoded(self, rows: list[Mapping[str, Any]], is_list: bool) -> NDArray[Any]:
        """Encode JSON rows as network inputs (rows, ...).

        Raises Refusal for a bad cell. Its `field` is such as "age", or "rows[3].age" in a list.
        """

    def reader(self, items: Sequence[bytes]) -> None:
        """Return None: rows must be counted and checked before they join a batch."""

    async def decode(self, *items: bytes) -> Decoded:
        """Parse the JSON body of a request and encode its rows. Raises Refusal for a bad body."""
        payload = items[0]
        if len(payload) <= INLINE_BYTES:
            return self._decode(payload)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._decode, payload
        )

    def close(self) -> None:
        """End the thread without waiting for work that is no longer needed."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _decode(self, payload: bytes) -> Decoded:
        self._require_few_values(payload)
        rows, is_list = self._rows(parse(payload))
        return Decoded(self.encoded(rows, is_list), is_list)

    def _require_few_values(self, payload: bytes) -> None:
        width = len(self._contract.accepted)
        if may_exceed(payload, (self._max_rows + 1) * (width + 4) + _SPARE_VALUES):
            most = f"{self._max_rows} rows of {width} columns can have"
            raise Refusal("too_many_rows", f"the body has more values than {most}; {_FEWER_ROWS}")

    def _rows(self, content: Any) -> tuple[list[Mapping[str, Any]], bool]:
        if not isinstance(content, dict):
            raise Refusal("not_a_row", f"the body is {_kind(content)}; {ACCEPTED_ROWS}")
        rows = listed_rows(content)
        if rows is None:
            return [content], False
        if not rows:
            message = "the list of rows is empty, expected at least one row"
            raise Refusal("no_rows", message, field="rows")
        if len(rows) > self._max_rows:
            limit = f"there are {len(rows)} rows in one request, the limit is {self._max_rows}"
            raise Refusal("too_many_rows", f"{limit}; {_FEWER_ROWS}", field="rows")
        for position, row in enumerate(rows):
            if not isinstance(row, dict):
                message = f"row {position} is {_kind(row)}, expected an object of columns"
                raise Refusal("not_a_row", message, field=f"rows[{position}]")
        return rows, True


class RowDecoder(JsonDecoder[ColumnContract]):
    """Decodes JSON rows of a table to network inputs."""

    def encoded(self, rows: list[Mapping[str, Any]], is_list: bool) -> NDArray[np.float32]:
        """Encode rows as (rows, width) float32. Raises Refusal for the first bad cell."""
        faults: list[tuple[int, CellError]] = []
        cells = []
        for position, row in enumerate(rows):
            # Not inside `except`: each fault would hold the first one as its context.
            with suppress(CellError):
                cells.append(read_row(row, self._contract))
                continue
            found = islice(cell_faults(row, self._contract), MAX_FAULTS - len(faults))
            faults += [(position, fault) for fault in found]
            if len(faults) == MAX_FAULTS:
                break
        if not faults:
            with suppress(CellError):  # the error does not name the row
                return encode_rows(cells, self._contract)
            faults = list(islice(_too_large(cells, self._contract), MAX_FAULTS))
        raise refusal(faults, is_list)


class TextDecoder(JsonDecoder[TextContract]):
    """Decodes JSON texts to network inputs."""

    def encoded(self, rows: list[Mapping[str, Any]], is_list: bool) -> NDArray[Any]:
        """Encode texts as (rows, length): uint8 bytes or int32 tokens. Raises Refusal."""
        with suppress(CellError):
            return encode_texts([read_text(row, self._contract) for row in rows], self._contract)
        every = (
            (position, fault.with_traceback(None))
            for position, row in enumerate(rows)
            for fault in text_faults(row, self._contract)
        )
        raise refusal(list(islice(every, MAX_FAULTS)), is_list)


def cell_faults(row: Mapping[str, Any], contract: ColumnContract) -> Iterator[CellError]:
    """Yield all errors in a row: unknown columns first, then cells in the contract's order."""
    for name in row:
        if name not in contract.accepted:
            try:
                read_row({name: None}, contract)
            except CellError as error:
                yield error.with_traceback(None)  # frames would hold the list of faults
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


def refusal(faults: list[tuple[int, CellError]], is_list: bool) -> Refusal:
    """Return the refusal for the first error by row and column, which also lists some others."""
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
        if len(others) > _SHOWN_FAULTS:
            others[_SHOWN_FAULTS:] = ["..."]
        message += f". {count} more: {', '.join(others)}"
    return Refusal(first.rule, message, field=places[0])


def _kind(content: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(content), "a number")
