"""Errors and reports of `clean` for tables name the cause and the remedy."""

from pathlib import Path

import pytest
import yaml

from slipway.data.rules.result import check_usable
from slipway.data.rules.rules import TABLE_RULES
from slipway.data.tables.clean_step import column_notes, conflict_hint, table_report
from slipway.system.errors import DataError
from tests.data.raw_files import cleaned, data_params, numbered_csv, said, write_csv
from tests.project_params import clean_params


def test_one_error_names_all_unknown_columns_of_the_params(tmp_path: Path) -> None:
    data = data_params(
        numbered_csv(tmp_path / "t.csv"),
        target="targt",
        group_column="b",
        weight_column="b",
        columns={"c": said("number")},
    )
    with pytest.raises(DataError) as caught:
        cleaned(data)
    for part in (
        "did you mean 'target'",
        "data.columns names 'c'",
        "data.group_column and data.weight_column are both 'b'",
    ):
        assert part in str(caught.value)


def test_a_table_without_inputs_is_refused_with_the_reasons(tmp_path: Path) -> None:
    data = data_params(
        numbered_csv(tmp_path / "t.csv"), columns={"a": said("ignore"), "b": said("ignore")}
    )
    with pytest.raises(DataError, match=r"a: data\.columns says so"):
        cleaned(data)


def test_a_table_whose_rows_are_all_refused_is_still_counted(tmp_path: Path) -> None:
    table = cleaned(data_params(write_csv(tmp_path / "t.csv", "a,target\n1,\n2,NA\n")))
    assert table.cleaned.rows.num_rows == table.cells.num_rows == 0
    assert table.cleaned.quarantine.num_rows == 2


def test_the_report_counts_findings_and_names_skipped_rules(tmp_path: Path) -> None:
    data = data_params(numbered_csv(tmp_path / "t.csv", a_3="x", b_4="1e6"))
    report = table_report(cleaned(data), data, clean_params()).model_dump(exclude_none=True)
    assert (report["read"], report["kept"]) == (30, 29)
    assert report["refused"]["type_violation"]["examples"] == [
        {"source": "3", "detail": "a: found 'x', expected a finite number"}
    ]
    assert report["flagged"]["outlier"]["count"] == 1
    assert report["not_checked"]["out_of_range"] == "data.columns has no bounds"
    assert report["not_checked"]["bad_weight"] == "data.weight_column is null"
    assert set(report["checks"]) | set(report["not_checked"]) == set(TABLE_RULES)
    assert [column["kind"] for column in report["columns"]] == ["number", "number"]


@pytest.mark.parametrize(
    ("task", "cells", "hint"),
    [
        ("table_regression", ["lo", "hi"] * 20, "set data.task to table_classification"),
        (
            "table_regression",
            ["46,5", "1,5"] * 20,
            "but '46,5', '1,5'. For numbers such as '46,5' set data.decimal to ','",
        ),
        (
            "table_classification",
            [f"{row}.5" for row in range(40)],
            "set data.task to table_regression",
        ),
    ],
)
def test_a_target_of_the_wrong_task_names_the_setting_to_change(
    tmp_path: Path, task: str, cells: list[str], hint: str
) -> None:
    path = write_csv(
        tmp_path / "t.csv",
        "a;target\n" + "".join(f"{7 * row % 41}.5;{cell}\n" for row, cell in enumerate(cells)),
    )
    with pytest.raises(DataError, match=hint):
        cleaned(data_params(path, task))


def test_many_classes_with_several_rows_each_are_accepted(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "t.csv",
        "a,target\n" + "".join(f"{7 * row % 121}.5,k{row % 40}\n" for row in range(120)),
    )
    assert cleaned(data_params(path, "table_classification")).cleaned.rows.num_rows == 120


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("a:target", "separated by commas, semicolons, tabs or `|`"),
        ("a,TARGET", "did you mean 'TARGET'"),
    ],
)
def test_a_misread_header_is_reported_with_its_likely_cause(
    tmp_path: Path, header: str, hint: str
) -> None:
    with pytest.raises(DataError, match=hint):
        cleaned(data_params(write_csv(tmp_path / "t.csv", f"{header}\n{header}\n")))


def test_a_failed_clean_names_conflicts_and_ignored_columns(
    tmp_path: Path,
) -> None:
    rows = "".join(f'{row % 3},"{row},5",{row}\n' for row in range(30))
    table = cleaned(data_params(write_csv(tmp_path / "t.csv", f"a,price,target\n{rows}")))
    assert "set clean.rules.conflicting_label to flag" in conflict_hint(table.cleaned, "inputs")
    assert "price: its cells look like numbers such as '0,5': set data.decimal" in column_notes(
        table, Path("columns.yaml")
    )
    fine = cleaned(data_params(numbered_csv(tmp_path / "fine.csv")))
    assert conflict_hint(fine.cleaned, "inputs") == ""
    assert column_notes(fine, Path("columns.yaml")) == "\nthe columns' kinds are in columns.yaml"


def leaking_csv(path: Path) -> Path:
    """Write columns a, b, target, `thousands` (a multiple of the target) and `name` (free text)."""
    header, *lines = numbered_csv(path).read_text().splitlines()
    rows = [
        f"{line},{float(line.split(',')[2]) / 1000 + 3},name {number}"
        for number, line in enumerate(lines)
    ]
    return write_csv(path, "\n".join([f"{header},thousands,name", *rows]) + "\n")


def test_columns_yaml_pasted_into_params_still_excludes_a_copy_of_the_target(
    tmp_path: Path,
) -> None:
    data = data_params(leaking_csv(tmp_path / "t.csv"))
    first = cleaned(data)
    reason = "leakage: it is the target, or an exact linear function of it"
    assert (
        f"thousands: {{kind: ignore, min: null, max: null, required: false}} # {reason}"
        in first.columns_yaml
    )
    pasted = cleaned(data_params(Path(data.path), columns=yaml.safe_load(first.columns_yaml)))
    assert [column.name for column in first.types] == ["a", "b"]
    assert pasted.types == first.types
    assert pasted.cleaned.rows.equals(
        first.cleaned.rows
    )  # the ids too, or rows would move to other splits
    assert pasted.cells.equals(first.cells)


def test_clean_reports_a_target_copy_that_the_params_keep_as_input(tmp_path: Path) -> None:
    data = data_params(leaking_csv(tmp_path / "t.csv"))
    assert "inputs to check" not in column_notes(cleaned(data), Path("columns.yaml"))
    insisted = cleaned(data.model_copy(update={"columns": {"thousands": said("number")}}))
    assert [column.name for column in insisted.types] == ["a", "b", "thousands"]
    shown = column_notes(insisted, Path("columns.yaml")).partition("inputs to check:\n")[2]
    reason = "leakage: it is the target, or an exact linear function of it"
    assert shown == f"  thousands: {reason}; still an input, because data.columns names its kind"


def test_ignoring_a_column_moves_no_row_to_another_split(tmp_path: Path) -> None:
    data = data_params(numbered_csv(tmp_path / "t.csv"))
    without = data.model_copy(update={"columns": {"b": said("ignore")}})
    assert cleaned(without).cleaned.rows["id"].equals(cleaned(data).cleaned.rows["id"])


def test_cells_in_another_encoding_are_counted_and_named_with_a_remedy(tmp_path: Path) -> None:
    cities = ["München", "Köln", "Paris"] * 20
    lines = [f"{city},{row % 7},{row % 5}" for row, city in enumerate(cities)]
    path = write_csv(
        tmp_path / "t.csv", "\n".join(["city,b,target", "Bonn,9,9", *lines, ""]).encode("latin-1")
    )
    table = cleaned(data_params(path), rules={"near_duplicate": None, "conflicting_label": None})
    (city,) = (column for column in table.columns if column.name == "city")
    assert city.note == "40 of 61 cells are not in the encoding of data.encoding"
    (hint,) = table.hints
    assert hint.startswith(
        "40 cells are not UTF-8, the first in row 1, column 'city': 'M\ufffdnchen'"
    )
    assert f"iconv -f WINDOWS-1252 -t UTF-8 {path} > utf8.csv" in hint
    table = cleaned(data_params(path, encoding="latin-1"))
    assert table.types[0].kind == "category"
    assert not table.hints


@pytest.mark.parametrize("sources", [None, ["a.csv", "b.csv"]])
def test_the_remedy_for_another_encoding_names_the_file_in_the_folder(
    tmp_path: Path, sources: list[str] | None
) -> None:
    for name, city in (("a", "Bonn"), ("b", "Köln")):
        lines = [f"{city},{7 * row % 31 + ord(name)},{row % 5}" for row in range(30)]
        text = "\n".join(["city,b,target", *lines, ""])
        if sources or name == "b":
            write_csv(tmp_path / f"{name}.csv", text.encode("latin-1"))
    (hint,) = cleaned(data_params(tmp_path, sources=sources)).hints
    assert hint.startswith("30 cells are not UTF-8, ")
    assert f"-t UTF-8 {tmp_path / 'b.csv'} > utf8.csv" in hint


@pytest.mark.parametrize(("action", "found"), [("flag", 12), ("refuse", 11)])
def test_a_row_is_never_named_as_its_own_duplicate(tmp_path: Path, action: str, found: int) -> None:
    lines = ["a,b,target", *(f"{row},{row % 7},{row % 5}" for row in range(30))]
    lines += [f"5,5,{target}" for target in range(100, 111)]
    data = data_params(write_csv(tmp_path / "t.csv", "\n".join([*lines, ""])))
    table = cleaned(data, rules={"near_duplicate": action, "conflicting_label": None})
    findings = table.cleaned.flagged if action == "flag" else table.cleaned.quarantine
    rows = [one for one in findings.to_pylist() if one["rule"] == "near_duplicate"]
    assert len(rows) == found
    for one in rows:
        named = one["detail"].removeprefix("the same inputs as ").partition(" and ")[0].split(", ")
        assert one["source"] not in named
    if action == "flag":
        assert {one["detail"] for one in rows if one["source"] == "5"} == {
            "the same inputs as 30, 31, 32, 33, 34 and 6 more"
        }


def test_the_report_sorts_row_numbers_numerically(tmp_path: Path) -> None:
    cells = {f"a_{row}": "x" for row in (2, 10, 9)}
    data = data_params(numbered_csv(tmp_path / "t.csv", 120, **cells))
    clean = clean_params()
    report = table_report(cleaned(data), data, clean)
    examples = report.refused["type_violation"].examples
    assert [example.source for example in examples] == ["2", "9", "10"]


def test_error_for_a_missing_column_names_the_comments_above_the_header(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "# from the lab\n#target;a;b\n1,2,3\n4,5,6\n")
    with pytest.raises(DataError, match=r"data.target_column is 'target'") as raised:
        cleaned(data_params(path))
    assert str(raised.value).endswith(
        "\nIts header is line 3; 2 lines above it were skipped as comments: '# from the lab', "
        "'#target;a;b'. Remove the # if one of them is the header."
    )
    path.write_text("1,2,3\n4,5,6\n")
    with pytest.raises(DataError) as raised:
        cleaned(data_params(path))
    assert "comments" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("number", "its integers beyond 2**53 are one number in float64"),
        ("category", ""),
    ],
)
def test_integers_beyond_float64_are_never_called_a_constant(
    tmp_path: Path, kind: str, note: str
) -> None:
    rows = [f"{2**60 + row % 4},{row * 7 % 31},{row * 11 % 37}" for row in range(40)]
    path = write_csv(tmp_path / "t.csv", "\n".join(["big,x,target", *rows]) + "\n")
    table = cleaned(data_params(path, columns={"big": said(kind)}))
    (found,) = (column.note for column in table.columns if column.name == "big")
    assert found.startswith(note)
    assert "every row has" not in found


@pytest.mark.parametrize("task", ["table_classification", "table_regression"])
def test_a_target_of_dates_is_refused_as_dates(tmp_path: Path, task: str) -> None:
    rows = [f"{row * 7 % 31},2024-{1 + row // 28:02}-{1 + row % 28:02}" for row in range(60)]
    path = write_csv(tmp_path / "t.csv", "\n".join(["x,target", *rows]) + "\n")
    with pytest.raises(DataError, match=r"'target' holds dates such as '2024-01-01', .* month or"):
        cleaned(data_params(path, task))


def test_a_fraction_of_bad_rows_just_above_the_limit_is_shown_as_above(tmp_path: Path) -> None:
    rows = [f"{row * 7 % 2017},{'x' if row < 101 else row % 97}" for row in range(2019)]
    path = write_csv(tmp_path / "t.csv", "\n".join(["a,target", *rows]) + "\n")
    table = cleaned(data_params(path), max_bad_fraction=0.05)
    with pytest.raises(DataError, match=r"101 of 2019 samples are bad, .* 0\.050024765, above"):
        check_usable(table.cleaned, clean_params(max_bad_fraction=0.05), "table_regression")
