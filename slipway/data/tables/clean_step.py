"""Cleaning of a table, from the raw data to the result that the stage writes."""

from pathlib import Path

from slipway.config.sections import CleanParams, DataParams
from slipway.data.images.clean_result import CleanResult
from slipway.data.rules.report import CleanReport
from slipway.data.sources.checksums import read_checksums
from slipway.data.sources.raw_tables import read_raw_table
from slipway.data.tables.cleaning import CleanedTable, clean_table
from slipway.data.tables.files import TableColumns, write_cells
from slipway.data.tables.report import column_notes, conflict_hint, table_report
from slipway.data.tables.source import find_table


class CleanedRows(CleanResult):
    """The cleaned rows of a table."""

    def __init__(self, table: CleanedTable, data: DataParams, clean: CleanParams) -> None:
        super().__init__(table.cleaned)
        self.columns_yaml = table.columns_yaml
        self._table, self._data, self._clean = table, data, clean

    def report(self) -> CleanReport:
        """Count kept and refused rows by rule, with examples and the columns."""
        return table_report(self._table, self._data, self._clean)

    def write(self, folder: Path) -> None:
        """Write the typed cells of the kept rows."""
        table = self._table
        columns = TableColumns(inputs=table.types, ignored=table.ignored)
        write_cells(folder, table.cells, columns, table.ledger.bad_cell_table())

    def notes(self, columns: Path) -> str:
        """Name the columns that are no inputs."""
        return column_notes(self._table, columns.as_posix())

    def hint(self) -> str:
        """Name the remedy if many rows contradict each other."""
        return conflict_hint(self._table)


def clean_rows(data: DataParams, clean: CleanParams) -> CleanedRows:
    """Check and compare every row of the table."""
    path = find_table(data)
    if data.checksums:
        read_checksums(Path(data.checksums), Path(data.path)).check_table(path)
    return CleanedRows(clean_table(read_raw_table(path), data, clean), data, clean)
