import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from slipway.data.sources.text_format import USUAL_FORMAT
from slipway.inference.json_rows import plain_cell
from slipway.inference.local import LoadedModel
from slipway.inference.rows import read_table
from slipway.system.errors import CellError, DataError
from tests.serving.bundles import COLUMNS, ROW, table_row


def test_dataframe_has_the_answers_of_its_rows_as_dicts(table_model: LoadedModel) -> None:
    rows = [table_row(number) for number in range(70)]
    frame = pd.DataFrame(rows)
    expected = table_model.predict(rows)
    assert table_model.predict(frame) == expected
    assert table_model.predict(pa.Table.from_pandas(frame)) == expected
    typed = frame.astype({"colour": "category"}).assign(since=pd.to_datetime(frame["since"]))
    assert table_model.predict(typed) == expected
    assert table_model.predict(frame.assign(label="yes").iloc[::-1]) == expected[::-1]


def test_cells_of_a_table_are_read_as_in_training() -> None:
    table = pa.table(
        {
            "age": ["41", " 41.0"],
            "income": ["28,500.50", "n/a"],
            "colour": ["green", "red"],
            "city": ["Zürich", ""],
            "member": ["yes", "0"],
            "since": ["2021-03-04", "null"],
        }
    )
    read = read_table(table, COLUMNS, USUAL_FORMAT)
    assert not read.faults
    typed = pa.Table.from_pylist(
        [ROW, {"age": 41, "income": None, "colour": "red", "member": False, "city": None}]
    )
    assert (read.inputs == read_table(typed, COLUMNS, USUAL_FORMAT).inputs).all()


@pytest.mark.parametrize(
    ("cell", "rule", "message"),
    [
        ({"age": 121}, "out_of_range", "age: found 121, expected"),
        ({"age": None}, "missing_value", "age: a value is missing"),
        ({"age": "old"}, "type_violation", "age: found 'old', expected a finite number"),
        ({"colour": "pink"}, "unknown_category", "colour: found 'pink', expected one of 3"),
        ({"member": "perhaps"}, "type_violation", "member: found 'perhaps', expected true or"),
        ({"income": 1e300}, "out_of_range", "income: a number is too large"),
        ({"since": "20210304"}, "type_violation", "since: found '20210304', which is not a date"),
    ],
)
def test_bad_cell_is_reported_and_the_other_rows_are_read(
    cell: dict[str, Any], rule: str, message: str
) -> None:
    name = next(iter(cell))
    column = [ROW[name], *cell.values(), ROW[name]]
    mixed = [None if one is None else str(one) for one in column]
    rows = {other: [value] * 3 for other, value in ROW.items()} | {name: mixed}
    read = read_table(pa.table(rows), COLUMNS, USUAL_FORMAT)
    assert read.positions.tolist() == [0, 2]
    assert read.faults[1].rule == rule
    assert str(read.faults[1]).startswith(message)
    assert (read.inputs[0] == read.inputs[1]).all()


def test_numpy_and_pandas_cells_are_read_as_plain_json_cells(table_model: LoadedModel) -> None:
    odd = ROW | {
        "age": np.int64(41),
        "income": np.float64(28500.5),
        "member": np.bool_(True),
        "since": pd.Timestamp("2021-03-04"),
    }
    assert table_model.predict(odd) == table_model.predict(ROW)
    lacking = {name: value for name, value in ROW.items() if name not in ("income", "since")}
    assert table_model.predict(lacking | {"income": float("nan"), "since": pd.NaT}) == (
        table_model.predict(lacking)
    )


def test_plain_cell_converts_numpy_and_pandas_cells() -> None:
    assert [plain_cell(cell) for cell in (np.float32(0.5), Decimal("0.1"), pd.NA, "x")] == [
        0.5,
        0.1,
        None,
        "x",
    ]
    assert plain_cell(np.datetime64("2021-03-04T05:06:07.123456789")) == datetime.datetime(
        2021, 3, 4, 5, 6, 7, 123456
    )
    assert plain_cell(np.datetime64("NaT")) is None


def test_error_gives_the_position_of_a_bad_row(table_model: LoadedModel) -> None:
    rows = [table_row(number) for number in range(40)]
    rows[33] |= {"age": -1}
    for given in (rows, pd.DataFrame(rows)):
        with pytest.raises(CellError, match=r"rows\[33\].age: found -1, expected") as caught:
            table_model.predict(given)
        assert caught.value.rule == "out_of_range"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("rows.csv", "found str, expected a dict of columns"),
        ([ROW, 3], "row 1 is int, expected a dict of columns"),
        (pd.DataFrame([ROW]).rename(columns={"age": "Age"}), r"no column 'age' \(there is 'Age'\)"),
        (pd.DataFrame([[1, 2]], columns=["age", "age"]), "has the column age more than once"),
        (
            pd.DataFrame([ROW | {"age": [1]}]),
            "the column 'age', whose type .* Slipway cannot read",
        ),
    ],
)
def test_values_that_are_not_rows_of_the_model_are_refused(
    table_model: LoadedModel, given: object, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        table_model.predict(given)
