import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from slipway.config.sections import DataParams
from slipway.data.tables.notation import find_marks, iso_date, read_date_as, read_numbers
from slipway.data.tables.packing import fit_columns
from slipway.data.tables.source import read_json_rows
from slipway.inputs.columns import read_cell
from slipway.system.errors import CellError
from tests.data.raw_files import cleaned, data_params, write_csv
from tests.project_params import PROJECT

NAN = float("nan")


@pytest.mark.parametrize(
    ("cells", "values", "unit"),
    [
        (["12.5%", "3 %", "-1%"], [12.5, 3, -1], "%"),
        (["12.5%", "3%", "0.5"], [12.5, 3, NAN], "%"),
        (["1", "2", "3%"], [1, 2, NAN], ""),
        (["$4.00", "-$5", "$-6", "$1,234.50"], [4, -5, -6, 1234.5], "$"),
        (["€ 5", "5 €", "$5"], [5, 5, NAN], "€"),
        (["1,234", "12"], [NAN, 12], ""),
        (["1,234.5", "1,000"], [1234.5, 1000], ""),
        (["1,234", "2,5", "1.5"], [NAN, NAN, 1.5], ""),
        (["1%2", "$5%", "a%", "7"], [NAN, NAN, NAN, 7], ""),
        (["12 EUR", "EUR 7.5", "3"], [12, 7.5, NAN], "EUR"),
        (["12 EURO", "5 eur", "3"], [NAN, NAN, 3], ""),
        (["(12.5)", "7.0-", "\u22123", "4"], [-12.5, -7, -3, 4], ""),
        (["2020-", "(1)", "5-", "4"], [NAN, NAN, NAN, 4], ""),
        (["(€ 12.5)", "€7.00-", "€ 4"], [-12.5, -7, 4], "€"),
        (["(5", "5)", "5--", "(-5)", "()", "8"], [NAN, NAN, NAN, NAN, NAN, 8], ""),
    ],
)
def test_the_numbers_of_a_column_share_one_unit_and_one_decimal_mark(
    cells: list[str], values: list[float], unit: str
) -> None:
    found = read_numbers(pa.array(cells), np.arange(len(cells)))
    np.testing.assert_array_equal(found.values, values)
    assert found.unit == unit


@pytest.mark.parametrize(
    ("columns", "choices"),
    [
        ([["1.234,56", "12,5"]], [(",", ".")]),
        ([["1.234,56 €", "7,00 €"], ["12,5 %"]], [(",", ".")]),
        ([["0,1257", "-0,3"], ["-540,66", "3178,20"]], [(",", None)]),
        ([["1'234.50", "2.5"]], [(".", "'")]),
        ([["1 234,56", "1\u202f234,5", "1\xa0234,1"]], [(",", " ")]),
        ([["1.234", "1.234.567"]], [(",", ".")]),
        ([["1.234", "12"], ["a", "b"]], [(".", None)]),
        ([["1.592", "2.113", "3.780"]], [(".", None), (",", ".")]),
        ([["1.592", "2.113", "3.780"], ["987", "12"]], [(".", None), (",", ".")]),
        ([["1.592", "2.113", "0.780"]], [(".", None)]),
        ([["1.592", "2.113", "3.780"], ["0.5"]], [(".", None)]),
        ([["1.592", "2.113", "3780"]], [(".", None)]),
        ([["1,234", "12"]], [(",", None), (".", ",")]),
        ([["1,234", "12"], ["0.5", "1.25"]], [(".", ",")]),
        ([["1 234", "12"]], [(".", " ")]),
        ([["(1.234,56)", "12,5-", "1.234,56 EUR"]], [(",", ".")]),
        ([["CHF 1’234.50", "CHF 7.20"]], [(".", "'")]),
        ([["a", "b,5"], [None, ""]], []),
    ],
)
def test_the_marks_of_numbers_are_found_if_all_columns_agree_on_them(
    columns: list[list[str]], choices: list[tuple[str, str | None]]
) -> None:
    cells = [(pa.array(column, pa.string()), np.ones(len(column), int)) for column in columns]
    assert list(find_marks(cells).choices) == choices


def test_a_date_in_any_format_gives_the_same_days_as_its_iso_date() -> None:
    days = read_date_as("31/12/2020", "%d/%m/%Y")
    assert iso_date(days) == "2020-12-31"
    assert iso_date(days + 0.5) == "2020-12-31T12:00:00+00:00"


def written_table(folder: Path) -> DataParams:
    lines = [
        f'{number % 40}.5%,"${number + 1},000.25",{number % 28 + 1:02}/12/2020,{number % 9}'
        for number in range(60)
    ]
    path = write_csv(folder / "t.csv", "\n".join(["rate,price,day,target", *lines, ""]))
    return data_params(path, date_format="%d/%m/%Y")


def test_training_and_service_read_numbers_and_dates_as_equal_values(tmp_path: Path) -> None:
    data = written_table(tmp_path)
    table = cleaned(data)
    assert [column.kind for column in table.types] == ["number", "number", "date"]
    contract = fit_columns(table.cells, np.ones(60, bool), table.types, PROJECT.precompute)
    sources = table.cleaned.rows["source"].to_pylist()
    sent = {source: cells for source, _, cells in read_json_rows(data, table.types, sources)}
    for source, trained in zip(sources, table.cells.to_pylist(), strict=True):
        received = json.loads(json.dumps(sent[source]))
        for column in contract.columns:
            assert read_cell(received[column.name], column) == trained[column.name]
    assert sent["0"] == {"rate": 0.5, "price": 1000.25, "day": "2020-12-01"}
    notes = {column.name: column.note for column in table.columns}
    assert notes["rate"] == "numbers with %; the service takes them without, as 12.5"
    assert "the service takes ISO 8601, as '2020-12-01'" in notes["day"]
    for name, wrong in (("rate", "0.5%"), ("price", "$4")):
        (column,) = (column for column in contract.columns if column.name == name)
        with pytest.raises(CellError, match="which has a unit, expected a finite number"):
            read_cell(wrong, column)


def test_missing_values_and_date_formats_do_not_change_row_ids(tmp_path: Path) -> None:
    data = written_table(tmp_path)
    others = data.model_copy(update={"date_format": None, "missing_values": ["0.5%"]})
    found = cleaned(others)
    assert set(found.cleaned.rows["id"].to_pylist()) == set(
        cleaned(data).cleaned.rows["id"].to_pylist()
    )
    assert found.cells["rate"].null_count == 2


@pytest.mark.parametrize(
    ("cells", "may_be_thousands"),
    [
        (["987", "1.234", "12.500", "3.000"], True),
        (["987 €", "1.234 €", "12.500 €", "3.000 €"], True),
        (["987", "1.234", "12.500", "3.000", "0.5"], False),
        (["1987", "1.234", "12.500", "3.000"], False),
        (["1.234", "12.500", "3.000", "0.125"], False),
        (["987", "1.234"], False),
    ],
)
def test_points_that_may_separate_thousands_are_doubted(
    cells: list[str], may_be_thousands: bool
) -> None:
    found = find_marks([(pa.array(cells), np.ones(len(cells), int))])
    assert [tuple(marks) for marks in found.choices] == [(".", None)] + [
        (",", "."),
    ] * may_be_thousands
