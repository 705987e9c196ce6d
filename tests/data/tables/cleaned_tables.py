"""Helpers for tests of cleaned tables."""

from slipway.data.tables.cleaning import CleanedTable


def row(table: CleanedTable, source: int) -> dict[str, object]:
    return next(found for found in table.cleaned.rows.to_pylist() if found["source"] == str(source))
