"""What the columns of a table hold: as the user says in `data.columns`, otherwise inferred from the cells.

A column whose cells are numbers but for a few is a column of numbers, and the few are type violations; the same for dates.
What cannot teach a network anything general (ids, free text, row counters) is no input, with the reason.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from numpy.typing import NDArray

from slipway.config.sections import ColumnParams
from slipway.data.sources.raw_tables import RawColumn, is_row_index
from slipway.data.tables.cells import BAD, FALSE_WORDS, GOOD, TRUE_WORDS, is_missing, typed_column
from slipway.inputs.columns import MAX_CATEGORY_LENGTH, ColumnType, Kind

USUAL_SHARE = 0.95  # of the present cells that are numbers (or dates) makes a column one of them
_MAX_FEW = 20  # distinct texts that may be categories in any table
_MAX_DISTINCT_SHARE = (
    0.5  # of the present cells; with more distinct texts than this they are ids or free text
)
# Numbers as people write them: a comma before the decimals, or marks between the thousands.
_WRITTEN = (
    r"^[+-]?([0-9]{1,3}([.,' \x{a0}\x{202f}][0-9]{3})+|[0-9]+)([.,][0-9]+)?([eE][+-]?[0-9]+)?$"
)
_MIN_COUNTED = 20  # rows from which on 0, 1, 2, ... is taken for a counter


@dataclass(frozen=True)
class ColumnGuess:
    """The kind of a column, given by the user or inferred; `reason` if it is ignored."""

    name: str
    kind: Kind | Literal["ignore"]
    reason: str


def column_types(
    raw: Mapping[str, RawColumn], said: Mapping[str, ColumnParams]
) -> list[ColumnGuess]:
    """Return the kind of each column, in order."""
    return [
        _said(name, said[name]) if name in said else infer(column) for name, column in raw.items()
    ]


def _said(name: str, said: ColumnParams) -> ColumnGuess:
    return ColumnGuess(name, said.kind, "data.columns says so" if said.kind == "ignore" else "")


def column_type(
    guess: ColumnGuess, said: ColumnParams | None, with_bounds: bool = True
) -> ColumnType:
    """Return the contract of an input column, with the user's bounds by default."""
    if guess.kind == "ignore":
        raise AssertionError(f"{guess.name!r} is no input")
    return ColumnType(
        name=guess.name,
        kind=guess.kind,
        required=said is not None and said.required,
        min=said.min if said and with_bounds else None,
        max=said.max if said and with_bounds else None,
    )


def infer(raw: RawColumn) -> ColumnGuess:
    """Infer the kind of a column from its cells."""
    if is_row_index(raw.name):
        return ColumnGuess(
            raw.name, "ignore", "its name is that of a row index of the program that wrote the file"
        )
    if raw.stored == "other":
        return ColumnGuess(raw.name, "ignore", f"its type {raw.arrow_type} has no kind")
    counts = np.bincount(raw.codes + 1, minlength=len(raw.values) + 1)[1:]
    present = int(counts[~is_missing(raw)].sum())
    if not present:
        return ColumnGuess(raw.name, "ignore", "it has no value at all")
    if raw.stored == "boolean":
        return ColumnGuess(raw.name, "boolean", "")
    if raw.stored == "number":
        return _number(raw)
    return _infer_text(raw, counts, present)


def _infer_text(raw: RawColumn, counts: NDArray[np.int64], present: int) -> ColumnGuess:
    missing = is_missing(raw)
    words = pa.array((*TRUE_WORDS, *FALSE_WORDS))
    is_word = pc.is_in(pc.utf8_lower(raw.values), words).to_numpy(zero_copy_only=False)
    if (is_word | missing).all():
        return ColumnGuess(raw.name, "boolean", "")
    if _share(raw, "number", counts, present) >= USUAL_SHARE:
        return _number(raw)
    if _share(raw, "date", counts, present) >= USUAL_SHARE:
        return ColumnGuess(raw.name, "date", "")
    written = pc.match_substring_regex(raw.values, _WRITTEN).to_numpy(zero_copy_only=False)
    if counts[written].sum() >= USUAL_SHARE * present:
        return ColumnGuess(raw.name, "ignore", _as_written(raw, written))
    long = counts[typed_column(raw, "category").states[:-1] == BAD].sum()
    if long > (1 - USUAL_SHARE) * present:
        return ColumnGuess(
            raw.name,
            "ignore",
            f"free text: {long} cells have more than {MAX_CATEGORY_LENGTH} characters",
        )
    distinct = int((~missing).sum())
    if distinct > max(_MAX_FEW, _MAX_DISTINCT_SHARE * present):
        return ColumnGuess(
            raw.name, "ignore", f"ids or free text: {distinct} different values in {present} cells"
        )
    return ColumnGuess(raw.name, "category", "")


def _as_written(raw: RawColumn, written: NDArray[np.bool_]) -> str:
    plain = typed_column(raw, "number").states[:-1] == GOOD
    example = raw.values[int(np.flatnonzero(written & ~plain)[0])].as_py()
    return (
        f"its cells look like numbers with a decimal comma or thousands separators, such as {example!r}: "
        "write them like -1234.5, or name its kind in data.columns"
    )


def _share(raw: RawColumn, kind: Kind, counts: NDArray[np.int64], present: int) -> float:
    good = typed_column(raw, kind).states[:-1] == GOOD
    return float(counts[good].sum()) / present


def _number(raw: RawColumn) -> ColumnGuess:
    if counts_rows(raw):
        cells = typed_column(raw, "number").cells
        return ColumnGuess(
            raw.name, "ignore", f"it counts the rows from {cells[0]:g} to {cells[-1]:g}"
        )
    return ColumnGuess(raw.name, "number", "")


def counts_rows(raw: RawColumn) -> bool:
    """True if the cells are integers that increase by one per row, in enough rows."""
    if raw.stored not in ("number", "text") or len(raw.codes) < _MIN_COUNTED:
        return False
    return bool((np.diff(typed_column(raw, "number").cells.astype(np.float64)) == 1).all())


def columns_yaml(types: Iterable[ColumnType], ignored: Mapping[str, str]) -> str:
    """Return the text of `reports/columns.yaml`, for the user to edit and put into params.yaml."""
    lines = [
        "# What each column holds. Correct it and put it under data.columns in params.yaml; docs/tables.md tells more."
    ]
    lines += [_entry(column.name, column.model_dump(exclude={"name"})) for column in types]
    lines += [
        _entry(name, {"kind": "ignore", "min": None, "max": None, "required": False})
        + " # "
        + " ".join(reason.split())
        for name, reason in ignored.items()
    ]
    return "\n".join(lines) + "\n" + ("" if len(lines) > 1 else "{}\n")


def _entry(name: str, fields: dict[str, object]) -> str:
    order = {key: fields[key] for key in ("kind", "min", "max", "required")}
    return yaml.safe_dump(
        {name: order}, default_flow_style=None, sort_keys=False, width=10_000, allow_unicode=True
    ).rstrip("\n")
