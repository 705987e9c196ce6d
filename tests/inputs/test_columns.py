import json
import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipway.inputs.columns import (
    _BLOCK_ROWS,
    MAX_CATEGORY_LENGTH,
    Column,
    ColumnContract,
    Kind,
    encode,
    encode_rows,
    read_date,
    read_row,
)
from slipway.system.errors import CellError

FINITE = st.floats(-1e30, 1e30, allow_nan=False)
KINDS: tuple[Kind, ...] = ("number", "category", "boolean", "date")
TEXTS = st.text('ab "\\é漢', min_size=1, max_size=5).filter(lambda text: text == text.strip())
STRATEGIES = {
    "number": FINITE | st.integers(-(2**60), 2**60),
    "boolean": st.booleans(),
    "date": st.datetimes().map(datetime.isoformat),
}


def column(name: str, kind: Kind, **changes: Any) -> Column:
    facts: dict[str, Any] = {
        "required": False,
        "min": None,
        "max": None,
        "has_missing": False,
        "categories": [],
        "quantiles": [],
    }
    return Column.model_validate(
        {"name": name, "kind": kind, "mean": 0.0, "std": 1.0, "fill": 0.0, **facts, **changes}
    )


def contract(*columns: Column) -> ColumnContract:
    return ColumnContract(kind="columns", columns=list(columns))


@st.composite
def contracts(draw: st.DrawFn) -> ColumnContract:
    """Draw a contract of up to six columns."""
    columns = []
    for index in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(KINDS))
        facts: dict[str, Any] = draw(
            st.sampled_from([{}, {"has_missing": True}, {"imputed": True}])
        )
        if kind == "category":
            facts = facts | {
                "categories": draw(st.lists(TEXTS, min_size=1, max_size=5, unique=True))
            }
        else:
            facts = facts | {
                "mean": draw(FINITE),
                "std": draw(st.floats(1e-3, 1e6)),
                "fill": draw(FINITE),
            }
        columns.append(column(f"c{index}", kind, **facts))
    return contract(*columns)


def json_rows(wanted: ColumnContract) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Return a strategy for rows that the contract accepts."""
    cells = {}
    for found in wanted.columns:
        values = STRATEGIES.get(found.kind, st.sampled_from(found.categories or [""]))
        cells[found.name] = values | st.none() if found.takes_missing else values
    return st.lists(st.fixed_dictionaries(cells), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.data())
def test_rows_encoded_singly_from_json_equal_rows_encoded_together_bit_for_bit(
    data: st.DataObject,
) -> None:
    wanted = data.draw(contracts())
    rows = data.draw(json_rows(wanted))
    typed = [read_row(row, wanted) for row in rows]
    columns: dict[str, Any] = {}
    for found in wanted.columns:
        cells = [row[found.name] for row in typed]
        columns[found.name] = cells if found.kind == "category" else np.array(cells, np.float64)
    together = encode(columns, wanted)
    sent = [json.loads(json.dumps(row)) for row in rows]
    alone = [
        encode_rows(
            [read_row(row, ColumnContract.model_validate_json(wanted.model_dump_json()))], wanted
        )
        for row in sent
    ]
    assert together.shape == (len(rows), *wanted.shape)
    assert together.dtype == np.float32
    assert np.concatenate(alone).tobytes() == together.tobytes()
    assert np.isfinite(together).all()


def column_by_column(columns: dict[str, Any], wanted: ColumnContract) -> NDArray[np.float32]:
    """Encode columns one by one: a plain reimplementation of `encode`."""
    values, indicators, codes = [], [], []
    for found in wanted.columns:
        cells = columns[found.name]
        if found.kind == "category":
            unknown = 0 if found.has_missing else 1
            codes.append(
                np.array(
                    [
                        found.categories.index(cell) + 1 if cell in found.categories else unknown
                        for cell in cells
                    ],
                    np.float32,
                )
            )
            continue
        numbers = np.array(cells, np.float64)
        missing = np.isnan(numbers)
        values.append(
            ((np.where(missing, found.fill, numbers) - found.mean) / found.std).astype(np.float32)
        )
        if found.has_missing:
            indicators.append(missing.astype(np.float32))
    return np.stack([*values, *indicators, *codes], axis=1)


@settings(deadline=None)
@given(st.data())
def test_encoding_all_columns_at_once_equals_encoding_each_column_separately(
    data: st.DataObject,
) -> None:
    wanted = data.draw(contracts())
    typed = [read_row(row, wanted) for row in data.draw(json_rows(wanted))]
    columns = {found.name: [row[found.name] for row in typed] for found in wanted.columns}
    expected = column_by_column(columns, wanted).tobytes()
    assert encode(columns, wanted).tobytes() == encode_rows(typed, wanted).tobytes() == expected


@pytest.mark.parametrize("num_rows", [0, 1, _BLOCK_ROWS, 2 * _BLOCK_ROWS + 1])
def test_encode_handles_any_number_of_rows_in_blocks(num_rows: int) -> None:
    wanted = contract(
        column("a", "number", has_missing=True, mean=3.0, std=7.0),
        column("b", "category", categories=["x", "y"]),
    )
    numbers = np.arange(num_rows, dtype=np.float64)
    columns: dict[str, Any] = {
        "a": np.where(numbers % 5 == 0, np.nan, numbers),
        "b": ["xy"[row % 2] for row in range(num_rows)],
    }
    assert encode(columns, wanted).tobytes() == column_by_column(columns, wanted).tobytes()


@settings(deadline=None)
@given(st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30)))
def test_read_date_keeps_microseconds_since_1970(moment: datetime) -> None:
    microseconds = (
        moment.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    ) // datetime.resolution
    assert read_date(moment.isoformat()) == pytest.approx(
        microseconds / 86_400_000_000, rel=1e-15, abs=1e-15
    )
    assert read_date(moment.isoformat()) == read_date(moment.isoformat() + "Z")


ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.lists(st.integers(), max_size=2)
)


@pytest.mark.process
@settings(deadline=None)
@given(ANYTHING, st.sampled_from(KINDS), st.booleans())
def test_any_json_value_is_read_as_a_cell_or_refused_by_a_rule(
    value: Any, kind: Kind, imputed: bool
) -> None:
    wanted = contract(
        column("c", kind, imputed=imputed, categories=["x"] if kind == "category" else [])
    )
    rule = ""
    try:
        assert np.isfinite(encode_rows([read_row({"c": value}, wanted)], wanted)).all()
    except CellError as error:
        rule = error.rule
    assert rule in {"", "type_violation", "missing_value", "unknown_category", "out_of_range"}


@pytest.mark.parametrize(
    ("kind", "value", "rule"),
    [
        ("number", "5", "type_violation"),
        ("number", True, "type_violation"),
        ("number", math.inf, "type_violation"),
        ("number", 10**400, "type_violation"),
        ("number", 11, "out_of_range"),
        ("number", -1, "out_of_range"),
        ("number", None, "missing_value"),
        ("boolean", 1, "type_violation"),
        ("boolean", "true", "type_violation"),
        ("date", "2026-02-31", "type_violation"),
        ("date", 5, "type_violation"),
        ("category", 5, "type_violation"),
        ("category", "x" * (MAX_CATEGORY_LENGTH + 1), "type_violation"),
        ("category", "y", "unknown_category"),
        ("category", " ", "missing_value"),
    ],
)
def test_cell_value_that_its_column_does_not_allow_is_refused_by_a_rule(
    kind: Kind, value: Any, rule: str
) -> None:
    bounds = {"min": 0.0, "max": 10.0} if kind == "number" else {}
    wanted = contract(column("c", kind, categories=["x"] if kind == "category" else [], **bounds))
    with pytest.raises(CellError) as caught:
        read_row({"c": value}, wanted)
    assert (caught.value.rule, caught.value.column) == (rule, "c")
    assert "expected" in caught.value.detail


@pytest.mark.parametrize(
    ("kind", "value", "shown"),
    [
        ("category", 5, "found 5,"),
        ("number", "5", "found the text '5',"),
        ("number", True, "found True,"),
    ],
)
def test_error_messages_quote_only_cells_that_are_text(kind: Kind, value: Any, shown: str) -> None:
    with pytest.raises(CellError, match=shown):
        read_row(
            {"c": value},
            contract(column("c", kind, categories=["5"] if kind == "category" else [])),
        )


def test_required_column_refuses_missing_values_even_if_training_rows_had_some() -> None:
    assert read_row({}, contract(column("c", "number", has_missing=True))) == {"c": None}
    with pytest.raises(CellError, match="a value is missing"):
        read_row({}, contract(column("c", "number", has_missing=True, required=True)))


def test_an_unknown_column_is_refused() -> None:
    with pytest.raises(CellError, match="there is no such column, expected c"):
        read_row({"c": 1, "d": 2}, contract(column("c", "number")))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("City", "did you mean 'city'"),
        (" city", "did you mean 'city'"),
        ("town", "expected city, size"),
    ],
)
def test_unknown_column_that_differs_in_case_gets_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(CellError, match=hint):
        read_row(
            {name: "x"},
            contract(column("city", "category", categories=["x"]), column("size", "number")),
        )


def test_contract_copied_with_other_columns_encodes_those() -> None:
    """Cached properties of the old columns are not copied."""
    one = contract(column("size", "number"))
    assert encode_rows([read_row({"size": 5}, one)], one).tolist() == [[5.0]]
    two = one.model_copy(update={"columns": [*one.columns, column("owned", "boolean")]})
    assert encode_rows([read_row({"size": 5, "owned": True}, two)], two).tolist() == [[5.0, 1.0]]
    assert two == contract(*two.columns)


def test_encoded_row_has_values_then_indicators_then_category_codes() -> None:
    wanted = contract(
        column("town", "category", categories=["x", "y"], has_missing=True),
        column("size", "number", mean=1.0, std=2.0, fill=3.0, has_missing=True),
        column("owned", "boolean"),
    )
    rows: list[dict[str, Any]] = [
        {"town": "y", "size": 5, "owned": True},
        {"town": "new", "size": None, "owned": False},
    ]
    encoded = encode_rows([read_row(row, wanted) for row in rows], wanted)
    assert encoded.tolist() == [[2.0, 1.0, 0.0, 2.0], [1.0, 0.0, 1.0, 0.0]]


def test_number_too_large_for_float32_is_refused_with_its_column() -> None:
    with pytest.raises(CellError, match="too large to be standardised") as caught:
        encode({"c": [1e300]}, contract(column("c", "number")))
    assert caught.value.column == "c"
    wide = contract(column("a", "number"), column("b", "number"), column("c", "number"))
    with pytest.raises(CellError) as caught:
        encode_rows([{"a": 1.0, "b": 1.0, "c": -1e300}, {"a": None, "b": 1e39, "c": 0.0}], wide)
    assert caught.value.column == "b"


@pytest.mark.parametrize("value", [None, "", 3, "x" * 300, {"a": [1]}, float("nan")])
def test_column_ignored_in_training_may_contain_any_value(value: Any) -> None:
    wanted = contract(column("c", "number")).model_copy(update={"ignored": ["id"]})
    assert read_row({"id": value, "c": 1}, wanted) == {"c": 1.0}
    with pytest.raises(CellError, match=r"there is no such column, expected c$"):
        read_row({"id": value, "c": 1, "Id": 1}, wanted)


def test_contract_without_ignored_columns_refuses_unknown_columns() -> None:
    content = contract(column("c", "number")).model_dump(mode="json")
    del content["ignored"]
    with pytest.raises(CellError, match="there is no such column"):
        read_row({"id": 1, "c": 1}, ColumnContract.model_validate(content))
