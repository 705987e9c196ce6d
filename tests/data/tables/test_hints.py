from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.data.tables.clean_step import table_report
from slipway.data.tables.column_types import infer
from slipway.data.tables.source import read_table_of
from slipway.reports.pages.clean_page import clean_page
from tests.data.raw_files import cleaned, data_params, said, write_csv
from tests.project_params import clean_params

QUIET = {"near_duplicate": None, "conflicting_label": None}


def hints(folder: Path, cells: list[str], **changes: Any) -> list[str]:
    lines = [f'"{cell}",{row % 7},{row % 11}' for row, cell in enumerate(cells)]
    path = write_csv(folder / "t.csv", "\n".join(["a,b,target", *lines, ""]))
    return cleaned(data_params(path, **changes), rules=QUIET).hints


def pasted(hint: str) -> object:
    return yaml.safe_load(hint.partition("params.yaml:\n")[2])


def test_hints_propose_words_among_numbers_as_missing_values(tmp_path: Path) -> None:
    cells = [str(number % 17) for number in range(90)] + ["?"] * 7 + ["-"] * 3
    first, last = hints(tmp_path, cells)
    assert first == (
        "column 'a', a category: 90 of 100 cells are numbers. The others are '?' (7), '-' (3)"
    )
    assert pasted(last) == {"missing_values": ["?", "-"]}
    assert hints(tmp_path, cells, missing_values=["?", "-"]) == []


def test_hints_do_not_propose_cells_with_digits_as_missing_values(tmp_path: Path) -> None:
    cells = [str(number % 17) for number in range(80)] + ["1-2"] * 20
    (hint,) = hints(tmp_path, cells)
    assert "The others are '1-2' (20)" in hint
    assert "type_violation: flag" in hint
    assert pasted(hint.replace(", with clean.rules.type_violation: flag", ":")) == {
        "a": {"kind": "number", "min": None, "max": None, "required": False}
    }
    assert hints(tmp_path, cells, columns={"a": said("category").model_dump()}) == []


@pytest.mark.parametrize(
    ("written", "found", "doubt"),
    [
        ("{day:02}/12/2020", "%d/%m/%Y", False),
        ("12/{day:02}/2020", "%m/%d/%Y", False),
        ("01.{month}.20", "%d.%m.%y", True),
        ("{day} Dec 2020 10:30", "%d %b %Y %H:%M", False),
    ],
)
def test_hints_propose_the_format_of_dates_that_are_not_iso_8601(
    tmp_path: Path, written: str, found: str, doubt: bool
) -> None:
    cells = [written.format(day=row % 28 + 1, month=row % 12 + 1) for row in range(60)]
    first, *_, last = hints(tmp_path, cells)
    assert "60 of 60 cells are dates such as" in first
    assert pasted(last) == {"date_format": found}
    assert hints(tmp_path, cells, date_format=found) == []


def test_hints_propose_a_kind_for_codes_with_leading_zeros(tmp_path: Path) -> None:
    (hint,) = hints(tmp_path, [f"0{1017 + 7 * (row % 9)}" for row in range(60)])
    assert "60 cells have leading zeros, which a number loses: '01017' is 1017" in hint
    assert pasted(hint) == {"a": {"kind": "category", "min": None, "max": None, "required": False}}


def test_hints_name_categories_that_differ_only_in_spelling(tmp_path: Path) -> None:
    cells = ["Paris", "paris", "Rome", "Rome"] * 20 + ["paris"]
    (hint,) = hints(tmp_path, cells)
    assert hint.startswith(
        "column 'a' has values that differ only in spelling: 'Paris' (20 rows) and 'paris' (21)."
    )
    columns = pasted(hint)
    assert columns == {"a": said("category", map={"Paris": "paris"}).model_dump()}
    assert hints(tmp_path, cells, columns=columns) == []


def test_hints_name_words_in_a_column_of_numbers_that_would_cost_rows(tmp_path: Path) -> None:
    first, last = hints(tmp_path, [str(number % 17) for number in range(97)] + ["?"] * 3)
    assert first == "column 'a', a number: 97 of 100 cells are numbers. The others are '?' (3)"
    assert pasted(last) == {"missing_values": ["?"]}


def test_the_time_column_is_read_in_the_configured_date_format(tmp_path: Path) -> None:
    lines = [f"{row % 7},{row % 28 + 1:02}/12/2020,{row % 11}" for row in range(60)]
    path = write_csv(tmp_path / "t.csv", "\n".join(["a,day,target", *lines, ""]))
    table = cleaned(data_params(path, time_column="day", date_format="%d/%m/%Y"), rules=QUIET)
    assert min(table.cleaned.rows["time"].to_pylist()) == 18597.0


def test_the_clean_report_contains_hints_on_class_names(tmp_path: Path) -> None:
    lines = [f"{row},{['cat', 'cat', 'Cat'][row % 3]}" for row in [*range(0, 90, 2), *range(45)]]
    path = write_csv(tmp_path / "t.csv", "\n".join(["a,target", *lines, ""]))
    data = data_params(path, "table_classification")
    report = table_report(cleaned(data, rules=QUIET), data, clean_params())
    (hint,) = report.hints
    assert pasted(hint) == {"label_map": {"Cat": "cat"}}
    assert "label_map" in clean_page(report, {})


@pytest.mark.parametrize("cell", ["2024.01.1{}", ""])
def test_clean_reports_a_column_without_any_date_in_the_format_instead_of_failing(
    tmp_path: Path, cell: str
) -> None:
    rows = [f"{cell.format(row % 3)},{row % 5},{row % 7}" for row in range(30)]
    path = write_csv(tmp_path / "t.csv", "\n".join(["d,a,target", *rows, ""]))
    columns = {"d": said("date", required=False).model_dump()}
    data = data_params(path, date_format="%d/%m/%Y", columns=columns)
    rules = {**QUIET, "type_violation": "flag", "all_missing": None}
    found = cleaned(data, rules=rules)
    assert "dates as" not in str(found)


def test_numbers_are_read_as_dates_if_they_match_the_configured_date_format(tmp_path: Path) -> None:
    rows = [f"202401{day:02},{day % 7},{day % 5}" for day in range(1, 31)]
    path = write_csv(tmp_path / "t.csv", "\n".join(["d,a,target", *rows, ""]))
    table = read_table_of(data_params(path, date_format="%Y%m%d"))
    assert infer(table.columns["d"]).kind == "date"
    assert infer(table.columns["a"]).kind == "number"
    plain = read_table_of(data_params(path))
    assert infer(plain.columns["d"]).kind != "date"


def special_hints(folder: Path, cells: list[str], **changes: Any) -> list[str]:
    """Return the hints on a table with these cells in column c, which is no input."""
    lines = [f'{row % 7},{row % 13},"{cell}",{row % 11}' for row, cell in enumerate(cells)]
    path = write_csv(folder / "t.csv", "\n".join(["a,b,c,target", *lines, ""]))
    return cleaned(data_params(path, **changes), rules=QUIET).hints


def test_hints_propose_the_format_of_a_time_column(tmp_path: Path) -> None:
    cells = [f"{row % 28 + 1:02}/12/2020" for row in range(60)]
    first, last = special_hints(tmp_path, cells, time_column="c")
    assert first == "column 'c': 60 of 60 cells are dates such as '01/12/2020'."
    assert pasted(last) == {"date_format": "%d/%m/%Y"}
    assert special_hints(tmp_path, cells, time_column="c", date_format="%d/%m/%Y") == []


def test_hints_name_unreadable_cells_of_time_and_target_columns(tmp_path: Path) -> None:
    cells = [f"2020-01-{row % 28 + 1:02}" for row in range(57)] + ["?", "?", "soon"]
    (hint,) = special_hints(tmp_path, cells, time_column="c")
    assert (
        hint == "column 'c', a date: 57 of 60 cells are dates. The others are '?' (2), 'soon' (1)"
    )
    numbers = [str(row % 17) for row in range(57)] + ["1-2"] * 3
    (hint,) = special_hints(tmp_path, numbers, target_column="c")
    assert hint == "column 'c', a number: 57 of 60 cells are numbers. The others are '1-2' (3)"


def test_hints_name_groups_that_differ_only_in_spelling(tmp_path: Path) -> None:
    (hint,) = special_hints(tmp_path, ["Anna", "anna", "Ben", "10", "11"] * 10, group_column="c")
    assert hint.startswith("column 'c' has values that differ only in spelling: 'anna' (10 rows)")
