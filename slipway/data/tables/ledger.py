"""Collects the verdicts of the rules on each row of a table, and every cell that breaks a rule.

A row that breaks several rules is refused under the first; the detail names them all.
"""

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.sections import Action
from slipway.data.engine.rows import QUARANTINE
from slipway.data.engine.scratch import ScratchTable, slices
from slipway.data.rules.rules import severity
from slipway.data.sources.raw_tables import RawColumn
from slipway.data.tables.cells import shown_cell
from slipway.data.tables.files import BAD_CELLS

_ROW = ("row", pa.int64())
_VERDICTS = pa.schema(
    [_ROW, ("rule", pa.string()), ("detail", pa.string()), ("is_refused", pa.bool_())]
)
_CELLS = pa.schema([_ROW, *((name, pa.string()) for name in BAD_CELLS.names[1:])])
_TEXTS = pa.schema([_ROW, ("text", pa.string())])


class Ledger:
    """Verdicts on the rows 0 to N - 1, whose numbers in the file are `numbers` (N,).

    `name` maps a row number to the row's name in reports. A row without a verdict takes one byte.
    """

    def __init__(self, numbers: NDArray[np.int64], name: Callable[[int], str] = str) -> None:
        self.numbers, self._name = numbers, name
        self.alive: NDArray[np.bool_] = np.ones(len(numbers), bool)  # not refused so far
        self._verdicts, self._bad_cells = ScratchTable(_VERDICTS), ScratchTable(_CELLS)
        self._corrections = ScratchTable(_TEXTS)

    def source(self, row: int) -> str:
        """Return the name of the row in the outputs."""
        return self._name(int(self.numbers[row]))

    def apply(self, action: Action, rule: str, verdicts: Iterable[tuple[int, str]]) -> None:
        """Refuse or flag rows under a rule; `verdicts` are pairs of a row and a detail."""
        for row, detail in verdicts if action is not None else ():
            self._verdicts.add(row, rule, detail, action == "refuse")
            if action == "refuse":
                self.alive[row] = False

    def apply_to_cells(
        self, action: Action, raw: RawColumn, broken: NDArray[np.bool_], rule: str, expected: str
    ) -> None:
        """Refuse or flag the rows whose cell is `broken` (N,) bool, and record each such cell."""
        for row in np.flatnonzero(broken).tolist() if action is not None else ():
            value = shown_cell(raw, row)
            detail = f"{raw.name}: found {value}, expected {expected}"
            self.apply(action, rule, [(row, detail)])
            self._bad_cells.add(row, raw.name, rule, value, action)

    def correct(self, row: int, text: str) -> None:
        """Record a correction of a row."""
        self._corrections.add(row, text)

    def corrections(self) -> pa.Table:
        """Return the corrections as a table of `row` and `text`."""
        return self._corrections.table().sort_by("row")

    def flags(self) -> pa.Table:
        """Return the rules that flag each row, kept or not, as `text` by `row`."""
        pairs = self._found(is_refused=False).select(["row", "rule"]).group_by(["row", "rule"])
        found = pairs.aggregate([]).sort_by([("row", "ascending"), ("rule", "ascending")])
        return pa.table([found["row"], found["rule"]], schema=_TEXTS)

    def quarantine(self, malformed: Iterable[tuple[int, str]]) -> pa.Table:
        """Return the refused and the malformed rows, by rule and number."""
        by_row = self._found(is_refused=True).group_by("row", use_threads=False)
        refused = by_row.aggregate([("rule", "first"), ("detail", "list")])
        found = pa.table(
            {
                "number": self.numbers[refused["row"].to_numpy()],
                "rule": refused["rule_first"],
                "detail": pc.binary_join(refused["detail_list"], "; "),
            }
        )
        others = [
            {"number": number, "rule": "malformed_row", "detail": detail}
            for number, detail in malformed
        ]
        found = pa.concat_tables([found, pa.Table.from_pylist(others, found.schema)])
        found = found.sort_by([("rule", "ascending"), ("number", "ascending")])
        rules = pc.unique(found["rule"])
        severities = pa.array(map(severity, rules.to_pylist()), pa.string())
        return pa.table(
            {
                "source": self._sources(found["number"].to_numpy()),
                "rule": found["rule"],
                "detail": found["detail"],
                "severity": severities.take(pc.index_in(found["rule"], rules)),
            },
            schema=QUARANTINE,
        )

    def flagged_rows(self) -> pa.Table:
        """Return the rules that kept rows break, as QUARANTINE."""
        found = self._found(is_refused=False)
        found = found.filter(pa.array(self.alive[found["row"].to_numpy()]))
        by_rule = found.group_by(["row", "rule"], use_threads=False)
        flags = by_rule.aggregate([("detail", "list")]).sort_by("row")
        return pa.table(
            {
                "source": self._sources(self.numbers[flags["row"].to_numpy()]),
                "rule": flags["rule"],
                "detail": pc.binary_join(flags["detail_list"], "; "),
                "severity": pa.repeat(pa.scalar("flag"), flags.num_rows),
            },
            schema=QUARANTINE,
        )

    def bad_cell_table(self) -> pa.Table:
        """Return `BAD_CELLS`, by row and column."""
        keys = [(name, "ascending") for name in ("row", "column", "rule")]
        found = self._bad_cells.table().sort_by(keys)
        sources = self._sources(self.numbers[found["row"].to_numpy()])
        return pa.table([sources, *found.columns[1:]], schema=BAD_CELLS)

    def _found(self, *, is_refused: bool) -> pa.Table:
        table = self._verdicts.table()
        return table.filter(pc.equal(table["is_refused"], is_refused))

    def _sources(self, numbers: NDArray[np.int64]) -> pa.ChunkedArray:
        names = (
            pa.array(map(self._name, numbers[part].tolist()), pa.string())
            for part in slices(len(numbers))
        )
        return pa.chunked_array(names, pa.string())
