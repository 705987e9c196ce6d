"""Tests of reading columns of the user's table for given rows, in the order of the rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.config.sections import DataParams
from slipway.data.tables.raw_columns import RawCells, read_raw_columns
from slipway.data.tables.source import read_json_rows
from slipway.system import files
from slipway.system.errors import DataError, IntegrityError
from tests.data.pictures import picture
from tests.data.raw_files import data_params, said, write_csv

NOTHING = Path("nowhere/transform.parquet")
TABLE = "place,age,bought,member,secret,target\n" + "".join(
    f"{['north', 'south', ''][row % 3]},{20 + row},2024-01-{row + 1:02d},"
    f"{['yes', 'no'][row % 2]},id-{row},{row}.5\n"
    for row in range(20)
)


def table(tmp_path: Path, **changes: Any) -> DataParams:
    return data_params(write_csv(tmp_path / "t.csv", TABLE), **changes)


def ids_of(data: DataParams, sources: list[str]) -> list[str]:
    found = {source: row_id for source, row_id, _ in read_json_rows(data, [], sources)}
    return [found[source] for source in sources]


def read(data: DataParams, names: list[str], sources: list[str]) -> dict[str, RawCells]:
    return {
        cells.name: cells
        for cells in read_raw_columns(data, names, ids_of(data, sources), sources, NOTHING)
    }


def test_raw_columns_have_their_kinds_and_the_order_of_the_requested_rows(tmp_path: Path) -> None:
    found = read(table(tmp_path), ["member", "place", "age", "bought", "secret"], ["4", "2", "0"])
    assert list(found) == ["member", "place", "age", "bought", "secret"]
    assert {name: cells.kind for name, cells in found.items()} == {
        "member": "boolean",
        "place": "category",
        "age": "number",
        "bought": "date",
        "secret": "category",
    }
    assert found["place"].values.tolist() == ["south", "", "north"]
    assert found["age"].values.tolist() == [24, 22, 20]
    assert found["member"].values.tolist() == [1, 1, 1]
    assert found["bought"].values.tolist() == [19723 + 4, 19723 + 2, 19723]
    assert found["secret"].values.tolist() == ["id-4", "id-2", "id-0"]
    assert found["place"].elsewhere == []
    assert read(table(tmp_path), ["place"], ["0", "3"])["place"].elsewhere == ["south"]


def test_raw_columns_use_kinds_of_the_params_and_read_ignored_columns(
    tmp_path: Path,
) -> None:
    data = table(
        tmp_path,
        columns={"age": said("category").model_dump(), "place": said("ignore").model_dump()},
    )
    found = read(data, ["age", "place"], ["1"])
    assert found["age"].values.tolist() == ["21"]
    assert found["place"].values.tolist() == ["south"]


def test_error_names_each_unknown_column_with_the_closest_match(tmp_path: Path) -> None:
    data = table(tmp_path)
    with pytest.raises(DataError) as caught:
        read_raw_columns(data, ["plase", "age", "zzz"], [], [], NOTHING)
    text = str(caught.value)
    assert "'plase', which is not there; did you mean 'place'?" in text
    assert "'zzz'" in text
    assert "evaluate.slices" in text
    assert "place, age, bought" in text


def test_rows_that_changed_since_they_were_cleaned_are_refused(tmp_path: Path) -> None:
    data = table(tmp_path)
    ids = ids_of(data, ["3", "4"])
    write_csv(tmp_path / "t.csv", TABLE.replace("24,", "25,"))
    with pytest.raises(IntegrityError, match="1 rows are gone or differ"):
        read_raw_columns(data, ["age"], ids, ["3", "4"], NOTHING)
    with pytest.raises(IntegrityError, match="1 rows are gone or differ"):
        read_raw_columns(data, ["age"], [ids[0], ids[0]], ["3", "99"], NOTHING)


def test_raw_columns_of_an_image_table_are_read_without_its_pixels(tmp_path: Path) -> None:
    images = [{"bytes": picture(seed), "path": f"{seed}.png"} for seed in range(4)]
    columns = {
        "image": images,
        "label": ["a", "b"] * 2,
        "camera": ["x", None, "y", "x"],
        "boxes": [[1], [], [2], [3]],
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    data = data_params(tmp_path / "t.parquet", "image_classification", "label")
    ids = [files.sha256_bytes(picture(seed))[:32] for seed in (3, 1)]
    found = read_raw_columns(data, ["camera"], ids, ["3:3.png", "1:1.png"], NOTHING)
    assert found[0].values.tolist() == ["x", ""]
    for name in ("boxes", "image"):
        with pytest.raises(DataError, match="expected text, numbers, booleans or dates"):
            read_raw_columns(data, [name], ids, ["3:3.png", "1:1.png"], NOTHING)


def test_transform_values_can_be_read_as_columns_even_for_class_folders(tmp_path: Path) -> None:
    files.write_bytes(tmp_path / "raw/cat/1.png", picture(1))
    data = data_params(tmp_path / "raw", "image_classification")
    pq.write_table(
        pa.table({"id": ["a", "b"], "blur": [0.5, None]}), tmp_path / "transform.parquet"
    )
    found = read_raw_columns(
        data, ["blur"], ["a", "b"], ["cat/1.png", "cat/2.png"], tmp_path / "transform.parquet"
    )
    assert found[0].kind == "number"
    assert np.isnan(found[0].values[1])
    with pytest.raises(DataError, match="is a folder of class folders, which has no columns"):
        read_raw_columns(data, ["blur"], ["a"], ["cat/1.png"], NOTHING)


def test_read_raw_columns_without_names_reads_no_file() -> None:
    assert read_raw_columns(data_params(Path("nowhere.csv")), [], [], [], NOTHING) == []
