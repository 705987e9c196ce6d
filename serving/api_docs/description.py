"""What a caller has to know of a table's columns: for /model, the page at / and the description of the API.

What only the network needs (means, scales, quantiles) stays inside.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from slipway.artifacts.bundle import Metric
from slipway.artifacts.uncertainty import Conformal
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.contract import InputContract

_MANY_DIGITS = 1e9  # from here on a whole number is shown in short, too
_IGNORED = {"description": "ignored, as in training: any value", "nullable": True}
_JSON_TYPES = {"number": "number", "category": "string", "boolean": "boolean", "date": "string"}


def describe_input(contract: InputContract) -> dict[str, Any]:
    """The contract as /model shows it; for a table with a row that can be sent as it is."""
    if not isinstance(contract, ColumnContract):
        return contract.model_dump(mode="json")
    columns = [describe_column(column) for column in contract.columns]
    return {
        "kind": contract.kind,
        "columns": columns,
        "ignored": contract.ignored,
        "example": example_row(contract),
    }


def describe_column(column: Column) -> dict[str, Any]:
    """One column: what it takes, whether it may be missing, and for categories what happens to others."""
    described = {"name": column.name, "kind": column.kind, "required": is_required(column)}
    if column.kind == "category":
        return described | {
            "categories": column.categories,
            "other_categories": "missing" if column.takes_missing else "refused",
        }
    if column.kind == "number":
        return described | {"min": column.min, "max": column.max}
    return described


def describe_coverage(conformal: Conformal, measured: Metric | None) -> dict[str, Any]:
    """The coverage of sets or intervals: the target, what was measured on the test rows, and what speaks against relying on it."""
    return {
        "target": conformal.coverage,
        "measured": measured.model_dump(mode="json") if measured else None,
        "verdict": conformal.verdict(measured.low, measured.high) if measured else None,
        "fitting_rows": conformal.rows,
        "few_rows": conformal.has_few_rows,
    }


def is_required(column: Column) -> bool:
    """Whether a row without it is refused: by the user's word, or because no row of the data lacked it."""
    return column.required or not column.takes_missing


def example_row(contract: ColumnContract) -> dict[str, Any]:
    """A row of typical values that the contract takes."""
    return {column.name: _example(column) for column in contract.columns}


def row_schema(contract: ColumnContract) -> dict[str, Any]:
    """JSON Schema of one row."""
    return {
        "type": "object",
        "properties": {column.name: _schema(column) for column in contract.columns}
        | dict.fromkeys(contract.ignored, _IGNORED),
        "required": [column.name for column in contract.columns if is_required(column)],
        "additionalProperties": False,
        "example": example_row(contract),
    }


def _example(column: Column) -> Any:
    if column.kind == "category":
        return column.categories[0] if column.categories else None
    if column.kind == "boolean":
        return column.fill >= 0.5
    if column.kind == "date":
        return (
            (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=round(column.fill)))
            .date()
            .isoformat()
        )
    return (
        int(column.fill)
        if column.fill.is_integer() and abs(column.fill) < _MANY_DIGITS
        else _short(column)
    )


def _short(column: Column) -> float:
    """The median in the digits that people write, unless that is out of bounds."""
    short = float(f"{column.fill:.6g}")
    is_within = (column.min is None or short >= column.min) and (
        column.max is None or short <= column.max
    )
    return short if is_within else column.fill


def _schema(column: Column) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": _JSON_TYPES[column.kind]}
    if column.kind == "category" and not column.takes_missing:
        schema["enum"] = column.categories
    if column.kind == "date":
        schema["description"] = "ISO 8601, a date or a date with time; UTC where no zone is given"
    if column.kind == "number":
        schema |= {
            name: bound
            for name, bound in (("minimum", column.min), ("maximum", column.max))
            if bound is not None
        }
    if not is_required(column):
        schema["nullable"] = True
    return schema
