from pathlib import Path

import pytest

from slipway.data.sources.formats.csv_files import find_csv_start
from slipway.data.sources.raw_tables import column_names, read_raw_table
from tests.data.raw_files import write_csv


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_csv_columns_may_be_separated_by_comma_semicolon_tab_or_bar(
    tmp_path: Path, mark: str
) -> None:
    path = write_csv(tmp_path / "t.csv", f"a{mark}b\r\n1{mark}2\r\n")
    assert column_names(path) == ["a", "b"]
    assert read_raw_table(path).columns["b"].values.to_pylist() == ["2"]


@pytest.mark.parametrize(
    "before",
    [
        "sep=;\n",
        '"SEP=;"\r\n',
        "\n# from the laboratory, in mm\n#\n",
        "#one column\nsep=;\n# a; b\n",
        '\ufeffsep=;\n# 5" pipes\n',
    ],
)
def test_a_separator_line_and_comments_before_the_csv_header_are_skipped(
    tmp_path: Path, before: str
) -> None:
    path = write_csv(tmp_path / "t.csv", f"{before}a;b\n1;2\n#3;4\n5;6;7\n")
    table = read_raw_table(path)
    assert column_names(path) == list(table.columns) == ["a", "b"]
    assert table.columns["a"].values.to_pylist() == ["1", "#3"]
    assert [number for number, _ in table.malformed] == [2]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("#id,b\n1,2\n", ["#id", "b"]),
        ("# id,b\n1,2\n", ["# id", "b"]),
        ('#,Name,target\n0,"Doe, John",3\n', ["#", "Name", "target"]),
        ('# by "A, B", of 2024\n#id;"b;c"\n1;2\n', ["#id", "b;c"]),
    ],
)
def test_a_header_that_begins_with_a_hash_sign_is_not_a_comment(
    tmp_path: Path, text: str, names: list[str]
) -> None:
    assert column_names(write_csv(tmp_path / "t.csv", text)) == names


def test_a_separator_line_may_name_any_single_character() -> None:
    assert find_csv_start("sep=^\na^b\n").delimiter == "^"
    assert find_csv_start("sep=\t\na\tb\n").delimiter == "\t"
    assert find_csv_start("sep=ab\n1,2\n") == (0, 0, ",")
