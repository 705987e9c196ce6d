from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.tables.cleaning import CleanedTable
from slipway.data.tables.source import find_table, read_json_rows
from slipway.system.errors import DataError, IntegrityError
from tests.data.raw_files import cleaned, data_params, numbered_csv, refusals, said, write_csv
from tests.data.tables.cleaned_tables import row


def classes_csv(path: Path, labels: list[str]) -> Path:
    rows = [f"{(7 * row) % 31}.5,{(11 * row) % 37},{label}" for row, label in enumerate(labels)]
    return write_csv(path, "\n".join(["a,b,target", *rows]) + "\n")


def notes(table: CleanedTable) -> dict[str, str]:
    return {column.name: column.note for column in table.columns if column.note}


def test_every_row_is_kept_or_refused_and_every_bad_cell_is_named(tmp_path: Path) -> None:
    path = numbered_csv(
        tmp_path / "t.csv",
        a_3="x",
        b_3="y",
        a_5="",
        b_5="NA",
        target_7="none",
        target_8="inf",
        target_9="many",
    )
    path.write_text(path.read_text() + "1,2\n")
    table = cleaned(data_params(path))
    found = refusals(table)
    assert {source: rule for source, (rule, _) in found.items()} == {
        "3": "type_violation",
        "5": "all_missing",
        "7": "missing_target",
        "8": "non_finite_target",
        "9": "not_a_number",
        "30": "malformed_row",
    }
    assert (
        found["3"][1]
        == "a: found 'x', expected a finite number; b: found 'y', expected a finite number"
    )
    assert (
        table.cleaned.rows.num_rows + table.cleaned.quarantine.num_rows
        == table.cleaned.num_read
        == 31
    )
    bad = [
        (cell["source"], cell["column"], cell["rule"], cell["value"])
        for cell in table.ledger.bad_cell_table().to_pylist()
    ]
    assert bad == [
        ("3", "a", "type_violation", "'x'"),
        ("3", "b", "type_violation", "'y'"),
        ("7", "target", "missing_target", "'none'"),
        ("8", "target", "non_finite_target", "'inf'"),
        ("9", "target", "not_a_number", "'many'"),
    ]


def test_a_flagged_cell_counts_as_missing_and_is_recorded_as_a_correction(tmp_path: Path) -> None:
    table = cleaned(
        data_params(numbered_csv(tmp_path / "t.csv", a_3="x")), rules={"type_violation": "flag"}
    )
    assert row(table, 3)["flags"] == ["type_violation"]
    assert row(table, 3)["corrections"] == ["a: 'x' -> missing"]
    assert row(table, 4)["flags"] == row(table, 4)["corrections"] == []
    cell = table.cells.filter(
        pa.compute.equal(table.cells["slipway_id"], str(row(table, 3)["id"]))
    )["a"][0]
    assert cell.as_py() is None


def test_an_unchecked_cell_counts_as_missing_without_a_flag(tmp_path: Path) -> None:
    table = cleaned(
        data_params(numbered_csv(tmp_path / "t.csv", a_3="x")), rules={"type_violation": None}
    )
    assert row(table, 3)["flags"] == []
    assert row(table, 3)["corrections"] == ["a: 'x' -> missing"]


@pytest.mark.parametrize(
    ("action", "kept", "bounds"), [("refuse", 29, True), ("flag", 30, True), (None, 30, False)]
)
def test_numbers_outside_the_users_bounds_are_refused_or_flagged_by_the_rule(
    tmp_path: Path, action: str, kept: int, bounds: bool
) -> None:
    columns = {"a": said("number", min=0.0, max=100.0)}
    data = data_params(numbered_csv(tmp_path / "t.csv", a_3="-1"), columns=columns)
    table = cleaned(data, rules={"out_of_range": action, "outlier": None})
    assert table.cleaned.rows.num_rows == kept
    assert (
        table.types[0].min is not None
    ) == bounds  # the service refuses only what is checked here
    if action == "refuse":
        assert refusals(table)["3"] == (
            "out_of_range",
            "a: found '-1', expected a finite number at least 0 and at most 100",
        )


def test_a_row_without_a_required_value_is_refused(tmp_path: Path) -> None:
    data = data_params(
        numbered_csv(tmp_path / "t.csv", a_3="", b_4=""),
        columns={"a": said("number", required=True)},
    )
    assert {source: rule for source, (rule, _) in refusals(cleaned(data)).items()} == {
        "3": "missing_value"
    }


def test_outliers_are_found_by_robust_deviations_in_inputs_and_target(tmp_path: Path) -> None:
    data = data_params(numbered_csv(tmp_path / "t.csv", a_3="1e6", target_4="1e6"))
    table = cleaned(data)
    assert row(table, 3)["flags"] == row(table, 4)["flags"] == ["outlier"]
    flags = row(cleaned(data, rules={"outlier": None}), 3)["flags"]
    assert "outlier" not in flags  # type: ignore[operator]
    assert set(refusals(cleaned(data, rules={"outlier": "refuse"}))) == {"3", "4"}


def test_labels_are_mapped_by_label_map_and_unknown_labels_are_refused(tmp_path: Path) -> None:
    labels = ["cat", "dog", " Cat", "cow", ""] + ["cat", "dog"] * 10
    data = data_params(
        classes_csv(tmp_path / "t.csv", labels),
        "table_classification",
        label_map={"Cat": "cat"},
        classes=["cat", "dog"],
    )
    table = cleaned(data)
    assert row(table, 2)["label"] == "cat"
    assert row(table, 2)["corrections"] == ["label: Cat -> cat"]
    assert {source: rule for source, (rule, _) in refusals(table).items()} == {
        "3": "unknown_label",
        "4": "missing_label",
    }


def test_bytes_that_are_not_utf8_make_a_category_or_a_class_unusable(tmp_path: Path) -> None:
    rows = [f"{['red', 'blue'][row % 3 == 0]},{row},{['cat', 'dog'][row % 2]}" for row in range(30)]
    content = (
        "\n".join(["colour,n,target", *rows])
        .encode()
        .replace(b"red,4,", b"r\xe9d,4,")
        .replace(b",7,dog", b",7,d\xf6g")
    )
    data = data_params(
        write_csv(tmp_path / "t.csv", content),
        "table_classification",
        columns={"n": said("number")},
    )
    table = cleaned(data)
    assert {source: rule for source, (rule, _) in refusals(table).items()} == {
        "4": "type_violation",
        "7": "type_violation",
    }
    assert "colour: found" in refusals(table)["4"][1]


def test_the_text_none_is_a_class_if_data_classes_lists_it(tmp_path: Path) -> None:
    labels = ["none", "some"] * 10
    path = classes_csv(tmp_path / "t.csv", labels)
    assert (
        cleaned(
            data_params(path, "table_classification", classes=["none", "some"])
        ).cleaned.rows.num_rows
        == 20
    )
    assert {
        rule for rule, _ in refusals(cleaned(data_params(path, "table_classification"))).values()
    } == {"missing_label"}


def test_group_time_weight_and_split_are_read_but_are_not_inputs(tmp_path: Path) -> None:
    rows = [
        f"{number * 7 % 11},{number * 5 % 7},g{number},2026-11-{number + 1:02},{number},Train"
        for number in range(9)
    ]
    rows += ["0,1,,x,-1,dev"]
    path = write_csv(
        tmp_path / "t.csv", "\n".join(["a,target,group,day,weight,part", *rows]) + "\n"
    )
    data = data_params(
        path, group_column="group", time_column="day", weight_column="weight", split_column="part"
    )
    table = cleaned(data)
    assert [column.name for column in table.types] == ["a"]
    found = row(table, 2)
    assert (found["group"], found["time"], found["weight"], found["given_split"]) == (
        "g2",
        20760.0,
        2.0,
        "train",
    )
    rules = [cell["rule"] for cell in table.ledger.bad_cell_table().to_pylist()]
    assert sorted(rules) == ["bad_split", "bad_time", "bad_weight", "missing_group"]


@pytest.mark.parametrize(("action", "kept"), [("refuse", 29), ("flag", 31), (None, 31)])
def test_equal_inputs_with_different_numeric_targets_follow_the_conflict_rule(
    tmp_path: Path, action: str, kept: int
) -> None:
    path = numbered_csv(tmp_path / "t.csv")
    lines = path.read_text().splitlines()
    a, b, _ = lines[5].split(",")
    path.write_text("\n".join([*lines, f"{a},{b},99"]) + "\n")
    table = cleaned(data_params(path), rules={"conflicting_label": action, "outlier": None})
    assert table.cleaned.rows.num_rows == kept
    if action == "refuse":
        assert refusals(table)["4"] == (
            "conflicting_target",
            "the same inputs with 20.0, 99.0: rows 4, 30",
        )
    else:
        twins = [row(table, 4), row(table, 30)]
        assert {twin["cluster"] for twin in twins} == {min(str(twin["id"]) for twin in twins)}
        has_flag = "conflicting_target" in twins[0]["flags"]  # type: ignore[operator]
        assert has_flag == (action == "flag")


@pytest.mark.parametrize(
    ("action", "kept", "clustered"), [("refuse", 30, 0), ("flag", 31, 2), (None, 31, 0)]
)
def test_rows_with_equal_inputs_follow_the_near_duplicate_rule(
    tmp_path: Path, action: str, kept: int, clustered: int
) -> None:
    lines = numbered_csv(tmp_path / "t.csv").read_text().splitlines()
    rows = [f"{line},person {number}" for number, line in enumerate([*lines[1:], lines[5]])]
    path = write_csv(tmp_path / "t.csv", "\n".join([f"{lines[0]},name", *rows]) + "\n")
    table = cleaned(data_params(path), rules={"near_duplicate": action})
    assert table.cleaned.rows.num_rows == kept
    assert (
        sum(found is not None for found in table.cleaned.rows["cluster"].to_pylist()) == clustered
    )


def test_constant_columns_and_copies_of_columns_are_not_inputs(tmp_path: Path) -> None:
    lines = numbered_csv(tmp_path / "t.csv").read_text().splitlines()
    rows = [f"{line},5,{line.split(',')[0]}" for line in lines[1:]]
    data = data_params(
        write_csv(tmp_path / "t.csv", "\n".join([f"{lines[0]},same,copy", *rows]) + "\n")
    )
    table = cleaned(data)
    assert [column.name for column in table.types] == ["a", "b"]
    assert notes(table) == {"same": "every row has '5'", "copy": "equal to 'a' in every row"}
    off = cleaned(data, rules={"constant_column": None, "duplicate_column": "flag"})
    assert [column.name for column in off.types] == ["a", "b", "same", "copy"]
    assert notes(off) == {"copy": "equal to 'a' in every row"}


def test_a_copy_of_the_target_is_dropped_as_leakage(tmp_path: Path) -> None:
    lines = numbered_csv(tmp_path / "t.csv").read_text().splitlines()
    copies = [float(line.split(",")[2]) / 1000 + 3 for line in lines[1:]]
    rows = [
        f"{line},{copy if number else ''}"
        for number, (line, copy) in enumerate(zip(lines[1:], copies, strict=True))
    ]
    data = data_params(
        write_csv(tmp_path / "t.csv", "\n".join([f"{lines[0]},thousands", *rows]) + "\n")
    )
    assert notes(cleaned(data)) == {
        "thousands": "leakage: it is the target, or an exact linear function of it"
    }
    nearly = write_csv(
        tmp_path / "u.csv",
        Path(data.path).read_text().replace(f",{copies[5]}", f",{copies[5] + 0.01}", 1),
    )
    assert notes(cleaned(data_params(nearly))) == {}
    insisted = cleaned(data.model_copy(update={"columns": {"thousands": said("number")}}))
    assert "thousands" in [column.name for column in insisted.types]
    assert "leakage" in notes(insisted)["thousands"]


def test_a_column_that_renames_the_classes_is_dropped_as_leakage(tmp_path: Path) -> None:
    labels = ["cat", "dog"] * 15
    lines = classes_csv(tmp_path / "t.csv", labels).read_text().splitlines()
    codes = {"cat": 3, "dog": 4}
    nearly = ["dog", *labels[1:]]
    rows = [
        f"{line},{codes[label]},{name}"
        for line, label, name in zip(lines[1:], labels, nearly, strict=True)
    ]
    path = write_csv(tmp_path / "t.csv", "\n".join([f"{lines[0]},code,nearly", *rows]) + "\n")
    assert notes(cleaned(data_params(path, "table_classification"))) == {
        "code": "leakage: its values are other names of the classes"
    }


def test_the_cleaned_table_does_not_depend_on_the_order_of_rows(tmp_path: Path) -> None:
    path = numbered_csv(tmp_path / "t.csv", a_3="x", a_5="")
    header, *lines = path.read_text().splitlines()
    backwards = write_csv(tmp_path / "u.csv", "\n".join([header, *reversed(lines)]) + "\n")
    one, other = cleaned(data_params(path)), cleaned(data_params(backwards))
    assert one.cleaned.rows.drop(["source"]).equals(other.cleaned.rows.drop(["source"]))
    assert one.cells.equals(other.cells)


def test_the_id_of_a_row_does_not_depend_on_a_row_index_column(tmp_path: Path) -> None:
    header, *lines = numbered_csv(tmp_path / "t.csv").read_text().splitlines()
    indexed = [f",{header}", *(f"{number},{line}" for number, line in enumerate(lines))]
    path = write_csv(tmp_path / "u.csv", "\n".join(indexed) + "\n")
    one, other = cleaned(data_params(tmp_path / "t.csv")), cleaned(data_params(path))
    assert one.cleaned.rows["id"].equals(other.cleaned.rows["id"])


def test_a_csv_and_a_parquet_of_equal_rows_give_equal_ids_and_cells(tmp_path: Path) -> None:
    path = numbered_csv(tmp_path / "t.csv", a_5="")
    pq.write_table(pa.csv.read_csv(path), tmp_path / "t.parquet")
    one, other = cleaned(data_params(path)), cleaned(data_params(tmp_path / "t.parquet"))
    assert one.cleaned.rows.equals(other.cleaned.rows)
    assert one.cells.equals(other.cells)


def test_read_json_rows_returns_the_ids_and_cells_that_clean_stored(tmp_path: Path) -> None:
    cells = [
        (f"{number % 7}.5", ["red", "NA"][number % 2], ["yes", "no", ""][number % 3])
        for number in range(30)
    ]
    rows = [
        f"{','.join(row)},2026-11-{number % 28 + 1:02}T10:00:00Z,{number}"
        for number, row in enumerate(cells)
    ]
    path = write_csv(tmp_path / "t.csv", "\n".join(["n,c,b,d,target", *rows]) + "\n")
    data = data_params(path, columns={"n": said("number", min=1.0)})
    table = cleaned(data, rules={"out_of_range": "flag"})
    sources = table.cleaned.rows["source"].to_pylist()
    found = {
        source: (row_id, row) for source, row_id, row in read_json_rows(data, table.types, sources)
    }
    expected = dict(zip(sources, table.cleaned.rows["id"].to_pylist(), strict=True))
    assert {source: row_id for source, (row_id, _) in found.items()} == expected
    assert found["1"][1] == {"n": 1.5, "c": None, "b": False, "d": "2026-11-02T10:00:00Z"}
    assert found["0"][1] == {
        "n": None,
        "c": "red",
        "b": True,
        "d": "2026-11-01T10:00:00Z",
    }  # 0.5 is out of range
    path.write_text(path.read_text().replace("1.5,NA,no", "1.25,NA,no"))
    changed = {
        source: row_id for source, row_id, _ in read_json_rows(data, table.types, ["1", "2"])
    }
    assert changed["1"] != found["1"][0]
    assert changed["2"] == found["2"][0]


def test_error_counts_the_wanted_json_rows_that_are_missing(tmp_path: Path) -> None:
    data = data_params(numbered_csv(tmp_path / "t.csv"))
    table = cleaned(data)
    with pytest.raises(IntegrityError, match="1 rows and 0 columns"):
        list(read_json_rows(data, table.types, ["3", "30"]))


def test_find_table_takes_only_a_table_at_the_top_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="holds no table"):
        find_table(data_params(tmp_path))
    path = numbered_csv(tmp_path / "t.csv")
    assert find_table(data_params(tmp_path)) == path
    (tmp_path / "u.csv").write_text("a\n")
    with pytest.raises(DataError, match=r"(?s)holds 2 CSV files.*u.csv: lacks b, target"):
        find_table(data_params(tmp_path))
    with pytest.raises(DataError, match="does not exist"):
        find_table(data_params(tmp_path / "none.csv"))
