"""What the rules say of each row of a table: refused or flagged, why, and what was changed in it.

Cells are named one by one; a row that breaks several rules is refused under the first, and the detail names them all.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.config.sections import Action
from slipway.data.engine.rows import QUARANTINE
from slipway.data.tables.files import BAD_CELLS

DUPLICATES = ("exact_duplicate", "near_duplicate")


class BadCell(NamedTuple):
    """One cell that breaks a rule."""

    row: int
    column: str
    rule: str
    value: str
    expected: str

    @property
    def detail(self) -> str:
        return f"{self.column}: found {self.value}, expected {self.expected}"


class Ledger:
    """Verdicts on the rows 0 to N - 1, whose numbers in the file are `numbers` (N,)."""

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self.numbers = numbers
        self.alive: NDArray[np.bool_] = np.ones(len(numbers), bool)  # not refused so far
        self.refused: dict[int, list[tuple[str, str]]] = defaultdict(
            list
        )  # rule and detail by row, in the order of the rules
        self.flagged: dict[int, dict[str, list[str]]] = defaultdict(
            lambda: defaultdict(list)
        )  # details by row and rule
        self.corrections: dict[int, list[str]] = defaultdict(list)
        self.bad_cells: list[tuple[BadCell, Action]] = []

    def source(self, row: int) -> str:
        """Return the name of the row in the output tables."""
        return str(self.numbers[row])

    def apply(self, action: Action, rule: str, verdicts: Iterable[tuple[int, str]]) -> None:
        """Refuse or flag each (row, detail)."""
        for row, detail in verdicts if action is not None else ():
            if action == "refuse":
                self.refused[row].append((rule, detail))
                self.alive[row] = False
            else:
                self.flagged[row][rule].append(detail)

    def apply_to_cells(self, action: Action, cells: Iterable[BadCell]) -> None:
        """Refuse or flag the rows of bad cells, and record each cell."""
        for cell in cells if action is not None else ():
            self.apply(action, cell.rule, [(cell.row, cell.detail)])
            self.bad_cells.append((cell, action))

    def correct(self, row: int, text: str) -> None:
        """Record a correction of a row."""
        self.corrections[row].append(text)

    def quarantine(self, malformed: Iterable[tuple[int, str]]) -> pa.Table:
        """Return `rows.QUARANTINE` of the refused and the malformed rows."""
        records = [
            self._record(str(number), [("malformed_row", detail)]) for number, detail in malformed
        ]
        records += [
            self._record(self.source(row), verdicts) for row, verdicts in self.refused.items()
        ]
        return pa.Table.from_pylist(
            sorted(records, key=lambda record: (record["rule"], int(record["source"]))),
            schema=QUARANTINE,
        )

    @staticmethod
    def _record(source: str, verdicts: list[tuple[str, str]]) -> dict[str, str]:
        rule = verdicts[0][0]
        severity = "duplicate" if rule in DUPLICATES else "error"
        return {
            "source": source,
            "rule": rule,
            "detail": "; ".join(detail for _, detail in verdicts),
            "severity": severity,
        }

    def flags(self) -> list[tuple[str, str, str]]:
        """Return (rule, source, detail) of each rule that a kept row breaks."""
        return [
            (rule, self.source(row), "; ".join(details))
            for row, rules in self.flagged.items()
            if self.alive[row]
            for rule, details in rules.items()
        ]

    def bad_cell_table(self) -> pa.Table:
        """Return `BAD_CELLS`, by row and column."""
        cells = sorted(self.bad_cells, key=lambda entry: entry[0][:3])
        columns = [
            [self.source(cell.row) for cell, _ in cells],
            [cell.column for cell, _ in cells],
            [cell.rule for cell, _ in cells],
            [cell.value for cell, _ in cells],
            [action for _, action in cells],
        ]
        return pa.table(dict(zip(BAD_CELLS.names, columns, strict=True)), schema=BAD_CELLS)
