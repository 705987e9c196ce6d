"""Records the verdicts of the rules on each row of a table, and every cell that breaks a rule.

A row that breaks several rules is refused under the first of them; the detail names all.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.sections import Action
from slipway.data.engine.rows import QUARANTINE
from slipway.data.engine.scratch import (
    ScratchTable,
    each_true,
    key_slices,
    numbers_of,
    order_by,
    scratch_array,
    slices,
    store_table,
    take,
    take_rows,
    true_rows,
)
from slipway.data.rules.rules import severity
from slipway.data.sources.raw_tables import RawColumn
from slipway.data.tables.cells import shown_cell
from slipway.data.tables.clean_files import BAD_CELLS

_ROW = ("row", pa.int64())
_VERDICTS = pa.schema(
    [_ROW, ("rule", pa.string()), ("detail", pa.string()), ("is_refused", pa.bool_())]
)
_CELLS = pa.schema([_ROW, *((name, pa.string()) for name in BAD_CELLS.names[1:])])
_TEXTS = pa.schema([_ROW, ("text", pa.string())])
_REFUSED = pa.schema([("number", pa.int64()), ("rule", pa.string()), ("detail", pa.string())])
_GROUPED_VERDICTS = 1 << 12  # verdicts that are in memory at a time
_32 = np.uint64(32)


class Ledger:
    """The verdicts on rows 0 to N - 1, whose numbers in the file are `numbers` (N,).

    `name` returns a row's name in reports, given its number. The verdicts are stored in files.
    """

    def __init__(self, numbers: NDArray[np.int64], name: Callable[[int], str] = str) -> None:
        self.numbers, self._name = numbers, name
        self.alive: NDArray[np.bool_] = scratch_array((len(numbers),), np.bool_)
        self.alive[:] = True  # no row is refused so far
        self._verdicts, self._bad_cells = ScratchTable(_VERDICTS), ScratchTable(_CELLS)
        self._corrections = ScratchTable(_TEXTS)

    def source(self, row: int) -> str:
        """Return the name that a row has in the outputs."""
        return self._name(int(self.numbers[row]))

    def apply(self, action: Action, rule: str, verdicts: Iterable[tuple[int, str]]) -> None:
        """Refuse or flag rows under a rule; `verdicts` are pairs of a row and its detail."""
        for row, detail in verdicts if action is not None else ():
            self._verdicts.add(row, rule, detail, action == "refuse")
            if action == "refuse":
                self.alive[row] = False

    def apply_to_cells(
        self, action: Action, raw: RawColumn, broken: NDArray[np.bool_], rule: str, expected: str
    ) -> None:
        """Refuse or flag the rows whose cell is `broken`, (N,) bool, and record these cells."""
        for row in each_true(broken) if action is not None else ():
            value = shown_cell(raw, row)
            detail = f"{raw.name}: found {value}, expected {expected}"
            self.apply(action, rule, [(row, detail)])
            self._bad_cells.add(row, raw.name, rule, value, action)

    def correct(self, row: int, text: str) -> None:
        """Record a correction of a row."""
        self._corrections.add(row, text)

    def corrections(self) -> pa.Table:
        """Return all corrections as a table of `row` and `text`."""
        return self._corrections.table().sort_by("row")

    def flags(self) -> pa.Table:
        """Return the rules that flag rows, kept or not, as a table of `row` and `text`."""

        def batches() -> Iterator[pa.RecordBatch]:
            for part in self._by_row(is_refused=False):
                found = part.select(["row", "rule"]).group_by(["row", "rule"]).aggregate([])
                found = found.sort_by([("row", "ascending"), ("rule", "ascending")])
                yield from pa.table([found["row"], found["rule"]], schema=_TEXTS).to_batches()

        return store_table(batches(), _TEXTS)

    def quarantine(self, malformed: Iterable[tuple[int, str]]) -> pa.Table:
        """Return the refused rows and the `malformed` ones, ordered by rule and number."""

        def by_number() -> Iterator[pa.RecordBatch]:
            for part in self._by_row(is_refused=True):
                by_row = part.group_by("row", use_threads=False)
                found = by_row.aggregate([("rule", "first"), ("detail", "list")])
                yield from self._with_details(found, found["rule_first"])
            others = [
                {"number": number, "rule": "malformed_row", "detail": detail}
                for number, detail in sorted(malformed)
            ]
            yield from pa.Table.from_pylist(others, _REFUSED).to_batches()

        found = store_table(by_number(), _REFUSED)

        def by_rule() -> Iterator[pa.RecordBatch]:
            for rule in sorted(pc.unique(found["rule"]).to_pylist()):
                for batch in found.to_batches():
                    yield self._named(batch.filter(pc.equal(batch["rule"], rule)), severity(rule))

        return store_table(by_rule(), QUARANTINE)

    def flagged_rows(self) -> pa.Table:
        """Return the rules that flag kept rows, as a table with the schema QUARANTINE."""

        def batches() -> Iterator[pa.RecordBatch]:
            for part in self._by_row(is_refused=False):
                kept = part.filter(pa.array(self.alive[part["row"].to_numpy()]))
                by_rule = kept.group_by(["row", "rule"], use_threads=False)
                flags = by_rule.aggregate([("detail", "list")]).sort_by("row")
                batches = self._with_details(flags, flags["rule"])
                yield from (self._named(batch, "flag") for batch in batches)

        return store_table(batches(), QUARANTINE)

    def _with_details(self, found: pa.Table, rules: pa.ChunkedArray) -> list[pa.RecordBatch]:
        """Convert grouped verdicts to the schema _REFUSED, with the details of a row joined."""
        numbers = self.numbers[found["row"].to_numpy()]
        details = pc.binary_join(found["detail_list"], "; ")
        batches: list[pa.RecordBatch] = pa.table([numbers, rules, details], _REFUSED).to_batches()
        return batches

    def _named(self, found: pa.RecordBatch, severity: str) -> pa.RecordBatch:
        """Convert rows of the schema _REFUSED to QUARANTINE, with the names of the rows."""
        sources = pa.array(map(self._name, found["number"].to_pylist()), pa.string())
        severities = pa.repeat(pa.scalar(severity), len(sources))
        return pa.record_batch(
            [sources, found["rule"], found["detail"], severities], schema=QUARANTINE
        )

    def bad_cell_table(self) -> pa.Table:
        """Return the bad cells with the schema BAD_CELLS, ordered by row and column."""
        keys = [(name, "ascending") for name in ("row", "column", "rule")]
        found = self._bad_cells.table().sort_by(keys)
        sources = self._sources(self.numbers[found["row"].to_numpy()])
        return pa.table([sources, *found.columns[1:]], schema=BAD_CELLS)

    def _by_row(self, *, is_refused: bool) -> Iterator[pa.Table]:
        """Yield the verdicts by row, in parts that hold all verdicts on each of their rows."""
        table = self._verdicts.table()
        chosen = true_rows(numbers_of(table["is_refused"], np.bool_) == is_refused)
        rows = take(numbers_of(table["row"], np.int64), chosen)
        keys = scratch_array((len(rows),), np.uint64)
        np.left_shift(rows.view(np.uint64), _32, out=keys)
        order = order_by(keys)
        for part in key_slices(len(order), lambda part: keys[order[part]], _GROUPED_VERDICTS):
            yield take_rows(table, chosen[order[part]])

    def _sources(self, numbers: NDArray[np.int64]) -> pa.ChunkedArray:
        names = (
            pa.array(map(self._name, numbers[part].tolist()), pa.string())
            for part in slices(len(numbers))
        )
        return pa.chunked_array(names, pa.string())
