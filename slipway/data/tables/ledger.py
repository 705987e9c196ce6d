"""Verdicts of the rules on each row of a table, with every cell that breaks one.

A row that breaks several rules is refused under the first; the detail names them all.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.config.sections import Action
from slipway.data.engine.rows import QUARANTINE
from slipway.data.rules.rules import severity
from slipway.data.sources.raw_tables import RawColumn
from slipway.data.tables.cells import shown_cell
from slipway.data.tables.files import BAD_CELLS


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
    """Verdicts on the rows 0 to N - 1, whose numbers in the file are `numbers` (N,).

    `name` gives the name of a number in the outputs.
    """

    def __init__(self, numbers: NDArray[np.int64], name: Callable[[int], str] = str) -> None:
        self.numbers, self._name = numbers, name
        self.alive: NDArray[np.bool_] = np.ones(len(numbers), bool)  # not refused so far
        # By row: the rules that it breaks and the details, in the order of the checks.
        self.refused: dict[int, list[tuple[str, str]]] = defaultdict(list)
        # By row and rule: the details.
        self.flagged: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.corrections: dict[int, list[str]] = defaultdict(list)
        self.bad_cells: list[tuple[BadCell, Action]] = []

    def source(self, row: int) -> str:
        """Return the name of the row in the outputs."""
        return self._name(int(self.numbers[row]))

    def apply(self, action: Action, rule: str, verdicts: Iterable[tuple[int, str]]) -> None:
        """Refuse or flag each (row, detail)."""
        for row, detail in verdicts if action is not None else ():
            if action == "refuse":
                self.refused[row].append((rule, detail))
                self.alive[row] = False
            else:
                self.flagged[row][rule].append(detail)

    def apply_to_cells(
        self, action: Action, raw: RawColumn, broken: NDArray[np.bool_], rule: str, expected: str
    ) -> None:
        """Refuse or flag the rows whose cell is `broken` (N,), and record each cell."""
        for row in np.flatnonzero(broken).tolist() if action is not None else ():
            cell = BadCell(row, raw.name, rule, shown_cell(raw, row), expected)
            self.apply(action, rule, [(row, cell.detail)])
            self.bad_cells.append((cell, action))

    def correct(self, row: int, text: str) -> None:
        """Record a correction of a row."""
        self.corrections[row].append(text)

    def quarantine(self, malformed: Iterable[tuple[int, str]]) -> pa.Table:
        """Return the refused and the malformed rows, by rule and number."""
        found = [(number, "malformed_row", detail) for number, detail in malformed]
        for row, verdicts in self.refused.items():
            details = "; ".join(detail for _, detail in verdicts)
            found.append((int(self.numbers[row]), verdicts[0][0], details))
        records = [
            {
                "source": self._name(number),
                "rule": rule,
                "detail": detail,
                "severity": severity(rule),
            }
            for number, rule, detail in sorted(found, key=lambda record: (record[1], record[0]))
        ]
        return pa.Table.from_pylist(records, schema=QUARANTINE)

    def flagged_rows(self) -> pa.Table:
        """Return the rules that kept rows break, as QUARANTINE."""
        records = [
            {
                "source": self.source(row),
                "rule": rule,
                "detail": "; ".join(details),
                "severity": "flag",
            }
            for row, rules in self.flagged.items()
            if self.alive[row]
            for rule, details in rules.items()
        ]
        return pa.Table.from_pylist(records, schema=QUARANTINE)

    def bad_cell_table(self) -> pa.Table:
        """Return `BAD_CELLS`, by row and column."""
        records = [
            {
                "source": self.source(cell.row),
                "column": cell.column,
                "rule": cell.rule,
                "value": cell.value,
                "action": action,
            }
            for cell, action in sorted(self.bad_cells, key=lambda entry: entry[0][:3])
        ]
        return pa.Table.from_pylist(records, schema=BAD_CELLS)
