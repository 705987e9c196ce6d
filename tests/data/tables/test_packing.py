from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from slipway.config.sections import DataParams
from slipway.data.engine.rows import SPLIT_ROWS
from slipway.data.store.packed import open_split, read_manifest
from slipway.data.tables.clean_files import TableColumns, read_cells, write_cells
from slipway.data.tables.cleaning import CleanedTable
from slipway.data.tables.packing import encode_cells, fit_columns, pack_table, rare_categories
from slipway.data.tables.source import read_json_rows
from slipway.inputs.columns import ColumnContract, ColumnType, encode_rows, read_row
from slipway.system.errors import CellError, DataError, IntegrityError
from tests.data.raw_files import cleaned, data_params, write_csv
from tests.project_params import PROJECT

PARAMS = PROJECT.precompute.model_copy(update={"num_quantiles": 5, "max_categories": 3})


def types(**kinds: str) -> list[ColumnType]:
    facts = {"required": False, "min": None, "max": None}
    return [
        ColumnType.model_validate({"name": name, "kind": kind, **facts})
        for name, kind in kinds.items()
    ]


def fitted(cells: dict[str, Any], num_training: int, **kinds: str) -> ColumnContract:
    table = pa.table(cells)
    return fit_columns(table, np.arange(table.num_rows) < num_training, types(**kinds), PARAMS)


def test_column_statistics_are_fitted_on_training_rows_only() -> None:
    column = fitted({"a": [1.0, 2.0, 3.0, 1000.0]}, 3, a="number").columns[0]
    assert (column.mean, column.fill, column.quantiles) == (2, 2, [1, 1.5, 2, 2.5, 3])
    assert column.std == pytest.approx(np.std([1, 2, 3]))
    other = fitted({"a": [1.0, 2.0, 3.0, -7.0]}, 3, a="number").columns[0]
    assert other == column


def test_categories_are_the_most_frequent_of_the_training_rows() -> None:
    column = fitted({"c": ["x", "y", "y", "z", "w", "v", "new"]}, 6, c="category").columns[0]
    assert column.categories == ["y", "v", "w"]
    assert column.has_missing  # x and z count as unknown, so there is a code for it


def test_precompute_reports_columns_with_more_categories_than_allowed() -> None:
    cells = {"c": ["x", "y", "y", "z", "w", "v", "new", None], "d": ["p", "q"] * 4}
    contract = fitted(cells, 6, c="category", d="category")
    (note,) = rare_categories(pa.table(cells), contract, max_categories=3)
    assert (
        note
        == "c: 3 of its 6 categories, in 3 rows, count as missing: precompute.max_categories is 3"
    )
    assert rare_categories(pa.table(cells), contract, max_categories=4) == []


def test_a_column_that_never_lacked_a_value_refuses_missing_values() -> None:
    contract = fitted({"a": [1.0, 2.0, 3.0], "c": ["x", "y", "x"]}, 2, a="number", c="category")
    for row, rule in (
        ({"a": None, "c": "x"}, "missing_value"),
        ({"a": 1, "c": "new"}, "unknown_category"),
    ):
        with pytest.raises(CellError) as caught:
            read_row(row, contract)
        assert caught.value.rule == rule


def test_a_value_missing_only_outside_training_rows_is_imputed_without_an_indicator() -> None:
    contract = fitted(
        {"a": [1.0, 2.0, 6.0, None], "c": ["y", "x", "x", "new"]}, 3, a="number", c="category"
    )
    assert contract.shape == (2,)  # no indicator: no training row could teach it
    lacking = encode_rows([read_row({"a": None, "c": "new"}, contract)], contract)
    usual = encode_rows([read_row({"a": 2.0, "c": "x"}, contract)], contract)
    assert np.array_equal(lacking, usual)


def test_a_column_with_values_missing_in_training_rows_gets_a_missing_indicator() -> None:
    contract = fitted({"a": [1.0, 3.0, None], "c": ["x", None, "y"]}, 3, a="number", c="category")
    row = encode_rows([read_row({"a": None, "c": None}, contract)], contract)[0]
    assert row.tolist() == [0.0, 1.0, 0.0]  # the median, its indicator, and the code for missing


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([None, None, 1.0], "'a' has no value in any training row"),
        ([1e308, -1e308, 1.0], "exceeds float64"),
    ],
)
def test_error_names_columns_that_cannot_be_fitted(cells: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        fitted({"a": pa.array(cells, pa.float64())}, 2, a="number")


def test_error_names_the_column_of_a_number_too_large_for_32_bits() -> None:
    contract = fitted({"a": [1.0, 2.0, 1e300]}, 2, a="number")
    with pytest.raises(DataError, match=r"up to 1e\+300. Give the column a min and max"):
        encode_cells(pa.table({"a": [1.0, 1e300]}), contract)


def mixed_table(folder: Path) -> tuple[DataParams, CleanedTable]:
    """Return a table of numbers, categories, booleans and dates, with missing cells.

    One category occurs in a single row.
    """
    generator = np.random.default_rng(5)
    rows = []
    for number in range(120):
        cells = [
            f"{generator.normal(0, 1e3):.6f}",
            f"town {generator.integers(5)}",
            ["yes", "no"][generator.integers(2)],
        ]
        cells += [
            f"20{generator.integers(10, 30)}-0{generator.integers(1, 9)}-11",
            f"{generator.normal():.3f}",
        ]
        cells = [cell if generator.random() > 0.1 else "" for cell in cells]
        rows.append(
            ",".join([*cells, "only here" if number == 7 else "usual", f"{generator.normal():.4f}"])
        )
    path = write_csv(folder / "t.csv", "\n".join(["n,c,b,d,m,rare,target", *rows]) + "\n")
    data = data_params(path)
    return data, cleaned(data)


def columns_of(table: CleanedTable) -> TableColumns:
    return TableColumns(inputs=table.types, ignored=table.ignored)


def split_rows(table: CleanedTable) -> pa.Table:
    """Return the rows, a quarter of them for testing, with the row of the rare category."""
    rows = table.cleaned.rows
    splits = [
        ("test", "train", "val", "train")[(int(source) + 1) % 4]
        for source in rows["source"].to_pylist()
    ]
    columns = {name: rows[name] for name in rows.schema.names}
    added = {
        "split": splits,
        "fold": pa.nulls(len(splits), pa.int32()),
        "leaked": np.zeros(len(splits), bool),
    }
    return pa.table(columns | added, schema=SPLIT_ROWS)


def test_packing_and_the_service_encode_a_row_to_the_same_bits(tmp_path: Path) -> None:
    data, table = mixed_table(tmp_path)
    (tmp_path / "packed").mkdir()
    contract = pack_table(
        split_rows(table), table.cells, columns_of(table), PARAMS, data.task, tmp_path / "packed"
    )
    manifest = read_manifest(tmp_path / "packed")
    assert manifest.input == contract
    assert {column.kind for column in contract.columns} == {"number", "category", "boolean", "date"}
    for name in ("train", "val", "test"):
        split = open_split(tmp_path / "packed", manifest, name, verify=True)
        sent = {
            source: (row_id, row)
            for source, row_id, row in read_json_rows(data, table.types, split.sources)
        }
        served = encode_rows(
            [read_row(sent[source][1], contract) for source in split.sources], contract
        )
        assert [sent[source][0] for source in split.sources] == split.ids
        assert np.asarray(split.inputs[:]).tobytes() == served.tobytes()
    assert sum(manifest.splits[name].rows for name in manifest.splits) == 120


def test_packing_refuses_cells_that_belong_to_other_rows(tmp_path: Path) -> None:
    data, table = mixed_table(tmp_path)
    with pytest.raises(IntegrityError, match="119 of 120 rows have no cells"):
        pack_table(
            split_rows(table),
            table.cells.slice(0, 1),
            columns_of(table),
            PARAMS,
            data.task,
            tmp_path,
        )


def test_the_column_contract_lists_the_ignored_columns(tmp_path: Path) -> None:
    rows = [f"{(7 * row) % 31}.5,note {row},{row / 8},g{row % 9},5,{row}" for row in range(40)]
    path = write_csv(
        tmp_path / "t.csv", "\n".join(["size,note,copy,person,same,target", *rows]) + "\n"
    )
    data = data_params(path, group_column="person")
    table = cleaned(data)
    write_cells(tmp_path / "clean", table.cells, columns_of(table), table.ledger.bad_cell_table())
    cells, columns = read_cells(tmp_path / "clean")
    (tmp_path / "packed").mkdir()
    contract = pack_table(split_rows(table), cells, columns, PARAMS, data.task, tmp_path / "packed")
    assert [column.name for column in contract.columns] == ["size"]
    assert contract.ignored == ["note", "copy", "person", "same"]
    assert read_manifest(tmp_path / "packed").input == contract
