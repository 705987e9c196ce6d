"""Tests of equal rows of a table: kept and numbered, or refused as copies of one row with an id."""

import random
from pathlib import Path

import pyarrow.compute as pc
import pytest

from slipway.config.sections import DataParams, PrecomputeParams
from slipway.data.engine.rows import content_of
from slipway.data.splits.split import split_rows
from slipway.data.store.packed import open_split, read_manifest
from slipway.data.tables.clean_files import TableColumns
from slipway.data.tables.cleaning import CleanedTable
from slipway.data.tables.packing import pack_table
from slipway.data.tables.raw_columns import read_raw_columns
from slipway.data.tables.source import read_json_rows
from slipway.export.certification.raw_rows import RawRowPositions
from slipway.system.errors import IntegrityError
from tests.data.raw_files import cleaned, data_params, numbered_csv, refusals, said, write_csv
from tests.data.tables.cleaned_tables import row
from tests.project_params import PROJECT

CONFLICTS = {"conflicting_label": "flag"}
SPLIT = PROJECT.split.model_copy(update={"assignment": "exact"})


def passengers_csv(path: Path, *, seed: int | None = None, extra: str = "") -> Path:
    """Write 891 passengers, of whom many have the same data, in an order drawn from `seed`."""
    lines = [
        f"{number * number % 3},{['male', 'female'][number % 5 == 0]},{number % 7 * 10 % 31},"
        f"{number * 11 % 5 % 2}{extra and extra.format(number)}"
        for number in range(891)
    ]
    if seed is not None:
        random.Random(seed).shuffle(lines)
    header = "pclass,sex,fare,survived" + (",id" if extra else "")
    return write_csv(path, "\n".join([header, *lines]) + "\n")


def passengers(path: Path, **changes: str) -> DataParams:
    return data_params(path, "table_classification", "survived", **changes)


def with_repeats(path: Path, *rows: int) -> Path:
    """Append a copy of these rows to a CSV."""
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, *(lines[row + 1] for row in rows)]) + "\n")
    return path


def stored(table: CleanedTable, root: Path) -> dict[str, object]:
    """Return the content of the packed store of a cleaned table, by split."""
    columns = TableColumns(inputs=table.types, ignored=table.ignored)
    params = PrecomputeParams.model_validate(PROJECT.precompute.model_dump())
    rows = split_rows(table.cleaned.rows, SPLIT, seed=0).rows
    root.mkdir()
    pack_table(rows, table.cells, columns, params, "table_classification", root)
    manifest = read_manifest(root)
    splits = {name: open_split(root, manifest, name) for name in ("train", "val", "test")}
    return {
        name: (split.ids, split.inputs[:].tolist(), split.targets.tolist())
        for name, split in splits.items()
    }


def test_clean_keeps_equal_rows_and_flags_each_of_them_by_default(tmp_path: Path) -> None:
    table = cleaned(data_params(with_repeats(numbered_csv(tmp_path / "t.csv"), 4)))
    assert refusals(table) == {}
    assert "duplicate_row" in row(table, 4)["flags"]  # type: ignore[operator]
    flagged = {
        found["source"]: found["detail"]
        for found in table.cleaned.flagged.to_pylist()
        if found["rule"] == "duplicate_row"
    }
    assert flagged == {"4": "the same row as 30", "30": "the same row as 4"}


def test_clean_refuses_all_but_the_first_of_equal_rows_if_duplicate_row_is_refuse(
    tmp_path: Path,
) -> None:
    data = data_params(with_repeats(numbered_csv(tmp_path / "t.csv"), 4, 4))
    table = cleaned(data, rules={"duplicate_row": "refuse"})
    assert refusals(table) == {
        "30": ("duplicate_row", "the same row as 4"),
        "31": ("duplicate_row", "the same row as 4"),
    }
    assert table.cleaned.num_bad == 0


def test_clean_keeps_equal_rows_without_a_flag_if_duplicate_row_is_null(tmp_path: Path) -> None:
    data = data_params(with_repeats(numbered_csv(tmp_path / "t.csv"), 4))
    table = cleaned(data, rules={"duplicate_row": None, "near_duplicate": None})
    assert row(table, 4)["flags"] == row(table, 30)["flags"] == []
    assert row(table, 4)["cluster"] is None


@pytest.mark.parametrize("action", ["flag", "refuse", None])
@pytest.mark.parametrize("cells", ["PassengerId,{0}", "ticket,a{0}", "n,{1}", ",{1}"])
def test_rows_that_repeat_an_id_are_refused_as_copies_under_every_rule(
    tmp_path: Path, cells: str, action: str | None
) -> None:
    name, cell = cells.split(",")
    header, *lines = numbered_csv(tmp_path / "t.csv").read_text().splitlines()
    lines = [f"{line},{cell.format(37 * n % 1000, n)}" for n, line in enumerate(lines)]
    path = write_csv(tmp_path / "t.csv", "\n".join([f"{header},{name}", *lines]) + "\n")
    table = cleaned(data_params(with_repeats(path, 4)), rules={"duplicate_row": action})
    detail = f"{name!r} repeats: the same row as 4"
    assert refusals(table) == {"30": ("exact_duplicate", detail)}
    assert table.cleaned.num_bad == 0


def test_equal_rows_with_different_row_indices_are_different_rows(tmp_path: Path) -> None:
    header, *lines = with_repeats(numbered_csv(tmp_path / "t.csv"), 4).read_text().splitlines()
    rows = [f"{number},{line}" for number, line in enumerate(lines)]
    table = cleaned(
        data_params(write_csv(tmp_path / "t.csv", "\n".join([f",{header}", *rows]) + "\n"))
    )
    assert refusals(table) == {}
    assert row(table, 30)["id"] == f"{row(table, 4)['id']}-2"


def test_a_column_that_data_columns_calls_an_input_holds_no_ids(tmp_path: Path) -> None:
    path = with_repeats(passengers_csv(tmp_path / "t.csv", extra=",{}"), 4)
    assert set(refusals(cleaned(passengers(path), rules=CONFLICTS))) == {"891"}
    data = passengers(path).model_copy(update={"columns": {"id": said("number")}})
    assert refusals(cleaned(data, rules=CONFLICTS)) == {}


def test_a_number_that_happens_to_differ_in_each_row_is_no_id(tmp_path: Path) -> None:
    path = numbered_csv(tmp_path / "t.csv")
    values = [line.split(",")[1] for line in path.read_text().splitlines()[1:]]
    assert len(set(values)) == 30
    assert refusals(cleaned(data_params(with_repeats(path, 4)))) == {}


def test_891_rows_of_which_many_are_equal_have_891_different_ids(tmp_path: Path) -> None:
    rows = cleaned(passengers(passengers_csv(tmp_path / "t.csv")), rules=CONFLICTS).cleaned.rows
    ids = rows["id"].to_pylist()
    assert len(set(ids)) == rows.num_rows == 891
    contents = set(map(content_of, ids))
    assert len(contents) < 100
    assert contents <= set(ids)  # the first of equal rows has the plain digest
    assert pc.count_distinct(rows["sha256"]).as_py() == len(contents)


def test_later_stages_find_each_of_equal_rows_in_the_raw_table(tmp_path: Path) -> None:
    data = passengers(passengers_csv(tmp_path / "t.csv"))
    table = cleaned(data, rules=CONFLICTS)
    ids, sources = (table.cleaned.rows[name].to_pylist() for name in ("id", "source"))
    found = read_json_rows(data, table.types, set(sources))
    positions = RawRowPositions(ids, sources)
    taken = sorted(positions.take(source, digest) for source, digest, _ in found)
    positions.check_all_taken()
    assert taken == list(range(891))
    (fares,) = read_raw_columns(data, ["fare"], ids, sources, tmp_path / "none.parquet")
    assert fares.values.tolist() == [int(source) % 7 * 10 % 31 for source in sources]
    Path(data.path).write_text(Path(data.path).read_text().replace(",female,", ",male,", 1))
    with pytest.raises(IntegrityError, match="changed since it was cleaned: 1 rows"):
        read_raw_columns(data, ["fare"], ids, sources, tmp_path / "none.parquet")


def test_shuffled_rows_give_the_same_store(tmp_path: Path) -> None:
    first, other = (
        cleaned(passengers(passengers_csv(tmp_path / f"{seed}.csv", seed=seed)), rules=CONFLICTS)
        for seed in (None, 1)
    )
    assert first.cleaned.rows["source"] != other.cleaned.rows["source"]
    kept = first.cleaned.rows.drop(["source"])
    assert kept.equals(other.cleaned.rows.drop(["source"]))
    assert first.cells.equals(other.cells)
    assert stored(first, tmp_path / "a") == stored(other, tmp_path / "b")


def test_equal_rows_are_numbered_by_target_and_weight_in_any_order_of_the_file(
    tmp_path: Path,
) -> None:
    """The classes 1 and 1.0 are one cell in a row's digest, and so are the weights 2 and 2.0."""
    cells = ["1.0,2", "1,2", "1.0,2.0", "1,2.0", "0,1"]
    found = []
    for order in (1, -1):
        lines = [f"{n % 3},{cell}" for cell in cells for n in range(6)][::order]
        path = write_csv(tmp_path / "t.csv", "\n".join(["a,target,weight", *lines]) + "\n")
        data = data_params(path, "table_classification", weight_column="weight")
        rows = cleaned(data, rules=CONFLICTS).cleaned.rows
        found.append(rows.select(["id", "label", "weight"]).to_pylist())
    assert found[0] == found[1]
    assert len({entry["id"] for entry in found[0]}) == 30
    labels = {entry["id"][33:]: entry["label"] for entry in found[0] if entry["label"] != "0"}
    assert [labels[key] for key in ("", "2", "4", "5", "8")] == ["1", "1", "1", "1.0", "1.0"]


@pytest.mark.parametrize("action", ["flag", None])
@pytest.mark.parametrize("assignment", ["exact", "stable"])
def test_equal_rows_stay_in_one_split_and_fold_under_any_rule(
    tmp_path: Path, action: str | None, assignment: str
) -> None:
    lines = [f"{n % 50},{n % 50 * 7 % 11}" for n in range(400)]
    path = write_csv(tmp_path / "t.csv", "\n".join(["a,target", *lines]) + "\n")
    table = cleaned(data_params(path), rules={"near_duplicate": action, "duplicate_row": action})
    params = SPLIT.model_copy(update={"assignment": assignment, "folds": 3})
    split = split_rows(table.cleaned.rows, params, seed=0)
    assert split.rows.num_rows == 400
    assert len(split.unit_sizes) == 50
    assert not split.leaks.found
    places = split.rows.select(["sha256", "split", "fold"]).group_by(["sha256", "split", "fold"])
    assert places.aggregate([]).num_rows == 50
