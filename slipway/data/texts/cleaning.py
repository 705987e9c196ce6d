"""Cleaning of texts: reads the text columns of a table and names all that break a rule.

Nothing is repaired or dropped silently: kept + quarantined == read. Texts are compared in the form
that networks see, in lower case. The result does not depend on the order of the rows.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.config.sections import CleanParams, DataParams
from slipway.data.engine.scratch import order_by, scratch_array, slices, store_table, take
from slipway.data.rules.report import CleanReport, CleanResult, ColumnSummary, clean_report
from slipway.data.rules.result import Cleaned
from slipway.data.rules.rules import TEXT_RULES
from slipway.data.sources.checksums import read_checksums
from slipway.data.sources.raw_tables import RawColumn, RawTable
from slipway.data.sources.text_format import NOT_UTF8
from slipway.data.tables.cells import DIGEST_BYTES, row_digests
from slipway.data.tables.clean_step import check_table
from slipway.data.tables.cleaning import (
    WRITTEN_ROWS,
    check_columns,
    find_outliers,
    kept_rows,
)
from slipway.data.tables.duplicate_rows import apply_equal_input_rules, refuse_duplicates
from slipway.data.tables.ledger import Ledger
from slipway.data.tables.source import identified_columns, read_table_of, stored_tables
from slipway.data.tables.targets import annotate
from slipway.data.texts.files import text_schema, write_texts
from slipway.data.texts.source import text_cells
from slipway.inputs.texts import normalised

check_texts = check_table
# White space is no control character here: a text may have lines and tabs.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_KEY_BYTES = 8


@dataclass(frozen=True)
class _TextColumn:
    """A text column of N rows and U distinct cells; the last entry is for rows without a cell."""

    raw: RawColumn
    lengths: NDArray[np.int64]  # (U + 1,) characters of the normalised text
    keys: NDArray[np.int64]  # (U + 1,) equal for texts that differ in case and white space only
    is_bad: NDArray[np.bool_]  # (U + 1,)
    has_control: NDArray[np.bool_]  # (U + 1,)


def clean_texts(data: DataParams, clean: CleanParams) -> CleanResult:
    """Check and compare every row; DataError if the columns do not match the params."""
    if data.checksums:
        listed = read_checksums(Path(data.checksums), data)
        for path in stored_tables(data):
            listed.check_table(path)
    raw = read_table_of(data)
    check_columns(raw, data)
    ledger = Ledger(raw.numbers, raw.source)
    annotations = annotate(raw, data, clean, ledger)
    columns = [_read(raw.columns[name]) for name in data.text_columns]
    _apply_rules(columns, clean, ledger)
    find_outliers([], annotations, raw.columns[data.target_columns[0]], clean, ledger)

    alive = np.flatnonzero(ledger.alive)
    found, num_bytes = row_digests(identified_columns(raw), alive)
    digests = scratch_array((len(ledger.alive), DIGEST_BYTES), np.uint8)
    for part in slices(len(alive)):
        digests[alive[part]] = found[part]
    refuse_duplicates(found, alive, ledger, annotations.given_splits)
    keys = [take(column.keys, column.raw.codes) for column in columns]
    clusters = apply_equal_input_rules(keys, annotations, digests, clean.rules, ledger)
    left = np.flatnonzero(ledger.alive)
    words = take(digests, left).view(">u8")  # (rows, 4), in the order of the hex digits
    order = take(left, order_by(*words.T))
    rows = kept_rows(raw, order, digests, clusters, num_bytes, annotations, ledger)
    cleaned = Cleaned(rows, ledger.quarantine(raw.malformed), raw.num_read, ledger.flagged_rows())
    summaries = _summaries(raw, columns)
    return CleanResult(
        cleaned,
        partial(_report, cleaned, data, clean, summaries),
        "{}\n",
        lambda folder: write_texts(folder, _kept_texts(columns, order, rows), data.text_columns),
        hint=_conflict_hint(cleaned),
    )


def _report(
    cleaned: Cleaned, data: DataParams, clean: CleanParams, columns: Sequence[ColumnSummary]
) -> CleanReport:
    return clean_report(cleaned, TEXT_RULES, data, clean, columns)


def _read(raw: RawColumn) -> _TextColumn:
    size = len(raw.values) + 1
    lengths, keys = scratch_array((size,), np.int64), scratch_array((size,), np.int64)
    is_bad, has_control = np.zeros(size, bool), np.zeros(size, bool)
    for code, cell in enumerate(text_cells(raw)):
        text = normalised(cell)
        lengths[code] = len(text)
        keys[code] = _key(text)
        is_bad[code] = NOT_UTF8 in cell
        has_control[code] = _CONTROL.search(cell) is not None
    lengths[-1], keys[-1] = 0, _key("")
    return _TextColumn(raw, lengths, keys, is_bad, has_control)


def _key(text: str) -> int:
    digest = hashlib.blake2b(text.casefold().encode(), digest_size=_KEY_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)


def _apply_rules(columns: Sequence[_TextColumn], clean: CleanParams, ledger: Ledger) -> None:
    rules = clean.rules
    lengths = np.zeros(len(ledger.alive), np.int64)
    for column in columns:
        codes = column.raw.codes
        bad, control = take(column.is_bad, codes), take(column.has_control, codes)
        expected = "text in data.encoding"
        ledger.apply_to_cells(rules.type_violation, column.raw, bad, "type_violation", expected)
        expected = "no control characters"
        ledger.apply_to_cells(
            rules.control_characters, column.raw, control, "control_characters", expected
        )
        lengths += take(column.lengths, codes)
    names = " and ".join(column.raw.name for column in columns)
    empty = ((row, f"{names}: no text") for row in np.flatnonzero(lengths == 0).tolist())
    ledger.apply("refuse", "missing_value", empty)
    for rule, broken, expected in (
        (
            "too_short",
            (lengths > 0) & (lengths < clean.min_characters),
            f"at least {clean.min_characters}",
        ),
        ("too_long", lengths > clean.max_characters, f"at most {clean.max_characters}"),
    ):
        details = (
            (row, f"{lengths[row]:,} characters, expected {expected}")
            for row in np.flatnonzero(broken).tolist()
        )
        ledger.apply(getattr(rules, rule), rule, details)


def _summaries(raw: RawTable, columns: Sequence[_TextColumn]) -> list[ColumnSummary]:
    found = []
    for column in columns:
        lengths = take(column.lengths, column.raw.codes)
        note = f"characters: median {np.median(lengths):.0f}, most {lengths.max():,}"
        missing = int((lengths == 0).sum())
        found.append(ColumnSummary(name=column.raw.name, kind="text", missing=missing, note=note))
    return found


def _kept_texts(
    columns: Sequence[_TextColumn], order: NDArray[np.int64], rows: pa.Table
) -> pa.Table:
    """Return the cells of the kept rows under their ids; null for no cell."""
    schema = text_schema([column.raw.name for column in columns])

    def batches() -> Iterator[pa.RecordBatch]:
        for part in slices(len(order), WRITTEN_ROWS):
            cells: list[pa.Array | pa.ChunkedArray] = [rows["id"][part]]
            for column in columns:
                codes = column.raw.codes[order[part]]
                values = [column.raw.values[code].as_py() if code >= 0 else None for code in codes]
                cells.append(pa.array(values, pa.string()))
            yield from pa.table(cells, schema=schema).to_batches()

    return store_table(batches(), schema)


def _conflict_hint(cleaned: Cleaned) -> str:
    """Suggest to flag conflicts if equal texts have different targets; else return ""."""
    rules = set(cleaned.quarantine["rule"].to_pylist())
    if not rules & {"conflicting_label", "conflicting_target"}:
        return ""
    return (
        "\nIf equal texts have different targets by nature, "
        "set clean.rules.conflicting_label to flag."
    )
