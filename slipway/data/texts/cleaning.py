"""Cleans texts: reads the text columns of a table, and finds all cells that break a rule.

Nothing is repaired or dropped silently: kept + quarantined == read. Texts are compared in the form
that networks see, in lower case. The result does not depend on the order of the rows.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.config.sections import Action, CleanParams, DataParams
from slipway.data.engine.scratch import (
    each_true,
    slices,
    store_table,
    take,
)
from slipway.data.rules.report import (
    CleanReport,
    CleanResult,
    ColumnSummary,
    clean_report,
    summarise_clusters,
)
from slipway.data.rules.result import Cleaned
from slipway.data.rules.rules import TEXT_RULES
from slipway.data.tables.clean_files import write_unlabelled
from slipway.data.tables.clean_step import check_listed, check_table, conflict_hint
from slipway.data.tables.cleaning import (
    WRITTEN_ROWS,
    check_columns,
    compare_whole_rows,
    find_outliers,
    kept_rows,
    rows_by_digest,
)
from slipway.data.tables.duplicate_rows import apply_equal_input_rules
from slipway.data.tables.ledger import Ledger
from slipway.data.tables.source import read_table_of
from slipway.data.tables.targets import annotate
from slipway.data.texts.clean_files import text_schema, write_texts
from slipway.data.texts.columns import (
    PERSONAL,
    TextColumn,
    num_characters,
    read_column,
)
from slipway.data.texts.near_duplicates import apply_near_duplicate_rule
from slipway.data.texts.profile import (
    apply_passage_rule,
    apply_script_rule,
    excerpts_of,
    passage_hints,
    profile_of,
)
from slipway.inputs.personal_data import IN_WORDS
from slipway.kinds.registry import kind_of

check_texts = check_table


def clean_texts(data: DataParams, clean: CleanParams) -> CleanResult:
    """Check and compare every row.

    Raises DataError if the columns do not match the params.
    """
    check_listed(data)
    raw = read_table_of(data)
    check_columns(raw, data)
    ledger = Ledger(raw.numbers, raw.source)
    annotations = annotate(raw, data, clean, ledger)
    columns = [read_column(raw.columns[name]) for name in data.text_columns]
    _apply_rules(columns, clean, ledger)
    find_outliers([], annotations, raw.columns[data.target_columns[0]], clean, ledger)

    digests, num_bytes = compare_whole_rows(raw, annotations, ledger)
    keys = [take(column.keys, column.raw.codes) for column in columns]
    clusters = apply_equal_input_rules(keys, annotations, digests, clean.rules, ledger)
    apply_near_duplicate_rule(columns, clusters, digests, annotations, clean, ledger)
    order = rows_by_digest(digests, ledger)
    several = kind_of(data.task).target.several
    scripts = apply_script_rule(columns, order, clean, ledger)
    profile = profile_of(columns, order, scripts, annotations, several=several)
    apply_passage_rule(profile, columns, order, clean, ledger)
    order = rows_by_digest(digests, ledger)
    rows = kept_rows(raw, order, digests, clusters, num_bytes, annotations, ledger)
    cleaned = Cleaned(rows, ledger.quarantine(raw.malformed), raw.num_read, ledger.flagged_rows())
    lengths = num_characters(columns)

    def report() -> CleanReport:
        has_clusters = clean.rules.near_duplicate == "flag"
        found = clean_report(
            cleaned,
            TEXT_RULES,
            data,
            clean,
            _summaries(columns),
            summarise_clusters(rows) if has_clusters else None,
            passage_hints(profile),
            profile,
            take(lengths, order),
        )
        return found.model_copy(update={"excerpts": excerpts_of(found, raw, columns)})

    def write(folder: Path) -> None:
        write_texts(folder, _kept_texts(columns, order, rows), data.text_columns)
        write_unlabelled(folder, raw, cleaned.quarantine)

    return CleanResult(
        cleaned,
        report,
        "{}\n",
        write,
        hint=conflict_hint(cleaned, "texts"),
    )


def _apply_rules(columns: Sequence[TextColumn], clean: CleanParams, ledger: Ledger) -> None:
    rules = clean.rules
    for column in columns:
        for rule, is_broken, expected in (
            ("type_violation", column.is_bad, "text in data.encoding"),
            ("control_characters", column.has_control, "no control characters"),
            ("garbled", column.is_garbled, "letters in data.encoding"),
            ("mixed_script", column.is_mixed, "each word in one script"),
        ):
            broken = take(is_broken, column.raw.codes)
            ledger.apply_to_cells(getattr(rules, rule), column.raw, broken, rule, expected)
        _apply_personal_rule(column, rules.personal_data, ledger)
    _apply_length_rules(columns, clean, ledger)


def _apply_length_rules(columns: Sequence[TextColumn], clean: CleanParams, ledger: Ledger) -> None:
    lengths = num_characters(columns)
    names = " and ".join(column.raw.name for column in columns)
    empty = ((row, f"{names}: no text") for row in each_true(lengths == 0))
    ledger.apply("refuse", "missing_value", empty)
    least, most = clean.min_characters, clean.max_characters
    for rule, broken, expected in (
        ("too_short", (lengths > 0) & (lengths < least), f"at least {least}"),
        ("too_long", lengths > most, f"at most {most}"),
    ):
        details = (
            (row, f"{lengths[row]:,} characters, expected {expected}") for row in each_true(broken)
        )
        ledger.apply(getattr(clean.rules, rule), rule, details)


def _apply_personal_rule(column: TextColumn, action: Action, ledger: Ledger) -> None:
    """Apply the rule `personal_data`; its details name the kinds of personal data, not the data."""
    found = take(column.personal, column.raw.codes)
    words = [
        f"{column.raw.name}: "
        + " and ".join(IN_WORDS[kind] for bit, kind in enumerate(PERSONAL) if bits >> bit & 1)
        for bits in range(1 << len(PERSONAL))
    ]
    rows = each_true(found.view(np.bool_))
    ledger.apply(action, "personal_data", ((row, words[found[row]]) for row in rows))


def _summaries(columns: Sequence[TextColumn]) -> list[ColumnSummary]:
    found = []
    for column in columns:
        lengths = take(column.lengths, column.raw.codes)
        missing = len(lengths) - int(np.count_nonzero(lengths))
        median = np.median(lengths, overwrite_input=True)
        note = f"characters: median {median:.0f}, most {lengths.max():,}"
        found.append(ColumnSummary(name=column.raw.name, kind="text", missing=missing, note=note))
    return found


def _kept_texts(
    columns: Sequence[TextColumn], order: NDArray[np.int64], rows: pa.Table
) -> pa.Table:
    """Return the text cells of the kept rows by id; null for rows without a cell."""
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
