"""The files of `clean` for tables: the rows without a target, as `slipway predict` reads them."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.rules.result import check_usable
from slipway.data.tables.clean_files import UNLABELLED, write_unlabelled
from slipway.data.tables.clean_step import clean_rows
from slipway.data.tables.source import read_table_of
from slipway.system.errors import DataError
from tests.data.raw_files import cleaned, data_params, numbered_csv, write_csv
from tests.project_params import clean_params


def test_rows_without_a_target_are_not_bad_however_many_there_are(tmp_path: Path) -> None:
    empty = {f"target_{row}": "NA" for row in range(20)}
    path = numbered_csv(tmp_path / "t.csv", 30, target_29="many", **empty)
    found = cleaned(data_params(path)).cleaned
    assert (found.rows.num_rows, found.num_bad, found.num_unlabelled) == (9, 1, 20)
    assert "read 30, kept 9, bad 1, without a target 20, duplicates 0" in found.summary(Path("r"))
    assert "missing_label" not in found.summary(Path("r"))
    with pytest.raises(DataError, match="1 of 10 samples that have a target are bad"):
        check_usable(found, clean_params(max_bad_fraction=0.05), "table_regression")
    check_usable(found, clean_params(max_bad_fraction=0.1), "table_regression")


def test_a_table_without_any_target_stops_the_run(tmp_path: Path) -> None:
    path = numbered_csv(tmp_path / "t.csv", 30, **{f"target_{row}": "" for row in range(30)})
    found = clean_rows(data_params(path, columns={}), clean_params()).cleaned
    with pytest.raises(DataError, match="none of 30 samples has a target"):
        check_usable(found, clean_params(), "table_regression")


def test_rows_without_a_target_are_written_with_their_raw_cells_in_the_files_order(
    tmp_path: Path,
) -> None:
    text = 'id,day,price,target\n7,x,"1,200",\n' + "".join(
        f"{row},2024-01-{row:02},{row}.5,{row * row % 17}\n" for row in range(10, 31)
    )
    path = write_csv(tmp_path / "t.csv", text + "8,2024-02-01,NA,null\n,,,\n")
    data = data_params(path)
    raw = read_table_of(data)
    write_unlabelled(tmp_path, raw, cleaned(data).cleaned.quarantine)
    assert pq.read_table(tmp_path / UNLABELLED).to_pylist() == [
        {"id": "7", "day": "x", "price": "1,200", "target": ""},
        {"id": "8", "day": "2024-02-01", "price": "NA", "target": "null"},
        {"id": "", "day": "", "price": "", "target": ""},
    ]


def test_typed_cells_of_rows_without_a_target_keep_their_types(tmp_path: Path) -> None:
    rows = {
        "code": [*range(40), None],
        "open": [True, False] * 20 + [True],
        "tags": [["a"]] * 41,
        "target": [row * 0.5 for row in range(40)] + [None],
    }
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    data = data_params(tmp_path / "t.parquet")
    write_unlabelled(tmp_path, read_table_of(data), cleaned(data).cleaned.quarantine)
    table = pq.read_table(tmp_path / UNLABELLED)
    assert table.schema.types == [pa.float64(), pa.bool_(), pa.float64()]
    assert table.to_pylist() == [{"code": None, "open": True, "target": None}]


def test_no_file_is_written_if_every_row_has_a_target(tmp_path: Path) -> None:
    data = data_params(numbered_csv(tmp_path / "t.csv"))
    write_unlabelled(tmp_path, read_table_of(data), cleaned(data).cleaned.quarantine)
    assert not (tmp_path / UNLABELLED).exists()
