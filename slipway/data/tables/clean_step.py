"""Cleans a table for the stage `clean`: from the raw file to the outputs of the stage."""

from functools import partial
from pathlib import Path

import pyarrow.compute as pc

from slipway.config.sections import CleanParams, DataParams
from slipway.data.rules.report import CleanReport, CleanResult, ColumnSummary, clean_report
from slipway.data.rules.result import Cleaned
from slipway.data.rules.rules import TABLE_RULES
from slipway.data.sources.checksums import read_checksums
from slipway.data.sources.raw_tables import RawTable
from slipway.data.tables.clean_files import TableColumns, write_cells, write_unlabelled
from slipway.data.tables.cleaning import CleanedTable, check_column_names, clean_table
from slipway.data.tables.source import columns_of, read_table_of, stored_tables


def check_table(data: DataParams) -> None:
    """Raise DataError if `data.path` is not a table or lacks a column."""
    check_column_names(columns_of(data), data)


def check_listed(data: DataParams) -> None:
    """Compare each stored table with `data.checksums`. Raises DataError if one was altered."""
    if data.checksums:
        listed = read_checksums(Path(data.checksums), data)
        for path in stored_tables(data):
            listed.check_table(path)


def clean_rows(data: DataParams, clean: CleanParams) -> CleanResult:
    """Check and compare every row of the table; return the result of cleaning."""
    check_listed(data)
    raw = read_table_of(data)
    table = clean_table(raw, data, clean)
    return CleanResult(
        table.cleaned,
        partial(table_report, table, data, clean),
        table.columns_yaml,
        partial(_write_cells, table, raw, data),
        partial(column_notes, table),
        conflict_hint(table.cleaned, "inputs"),
        table.hints,
    )


def _write_cells(table: CleanedTable, raw: RawTable, data: DataParams, folder: Path) -> None:
    columns = TableColumns(
        inputs=table.types,
        ignored=table.ignored,
        decimal=data.decimal,
        thousands=data.thousands,
    )
    write_cells(folder, table.cells, columns, table.ledger.bad_cell_table())
    write_unlabelled(folder, raw, table.cleaned.quarantine)


def table_report(table: CleanedTable, data: DataParams, clean: CleanParams) -> CleanReport:
    """Return the number of kept and refused rows by rule, with examples and the columns."""
    return clean_report(table.cleaned, TABLE_RULES, data, clean, table.columns, hints=table.hints)


def column_notes(table: CleanedTable, page: Path) -> str:
    """Return lines on the columns that are not inputs or need a check, and the name of the page."""
    dropped = [_note(column) for column in table.columns if column.kind == "ignore"]
    noted = [_note(column) for column in table.columns if column.kind != "ignore" and column.note]
    lines = [
        f"\nthe columns' kinds are in {page.as_posix()}{'; not inputs:' if dropped else ''}",
        *dropped,
    ]
    if noted:
        lines += ["inputs to check:", *noted]
    return "\n".join(lines)


def _note(column: ColumnSummary) -> str:
    return f"  {column.name or repr('')}: {column.note}"


def conflict_hint(cleaned: Cleaned, inputs: str) -> str:
    """Return advice to flag conflicts if rows with equal inputs have different targets; else ""."""
    rules = set(pc.unique(cleaned.quarantine["rule"]).to_pylist())
    if not rules & {"conflicting_label", "conflicting_target"}:
        return ""
    return (
        f"\nIf equal {inputs} have different targets by nature, "
        "set clean.rules.conflicting_label to flag."
    )
