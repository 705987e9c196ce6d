"""Columns without any value, of one row, one value, or equal values, of every type, in every use.

Each ends in a project or in a refusal, never in a traceback or a warning of numpy.
"""

import datetime
import decimal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.config.params import parse_params
from slipway.data.sources.raw_tables import stored_column
from slipway.data.sources.text_format import without_lists
from slipway.data.tables.clean_step import table_report
from slipway.data.tables.cleaning import clean_table
from slipway.data.tables.packing import encode_cells, fit_columns
from slipway.data.tables.source import read_table_of
from slipway.data.tables.target_copies import SUSPICIOUS, best_score
from slipway.project.column_roles import SampledColumn, sampled_columns, target_kinds
from slipway.project.inspection import inspect
from slipway.project.proposal import ProjectProposal, propose
from slipway.project.recipe import Machine
from slipway.system.errors import DataError, ParamsError, SlipwayError
from tests.data.raw_files import said

LAPTOP = Machine(cores=2, has_gpu=False, has_amx=False)
ROWS = 40
_DAY = datetime.datetime(2024, 1, 1)
# The type of a column, and its n-th value. A column of `None` has no value in any shape.
TYPES: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "words": (pa.string(), lambda n: f"word{n:02}"),
    "sentences": (pa.string(), lambda n: f"sentence {n} says what it says about some of the rows"),
    "words of a dictionary": (pa.dictionary(pa.int32(), pa.string()), lambda n: f"word{n:02}"),
    "label sets": (pa.string(), lambda n: f"a|b{n}"),
    "lists of words": (pa.list_(pa.string()), lambda n: [f"a{n}", "b"]),
    "lists of numbers": (pa.list_(pa.int64()), lambda n: [n]),
    "integers": (pa.int64(), lambda n: n * 7 % 41),
    "integers beyond float64": (pa.int64(), lambda n: 2**60 + n),
    "floats": (pa.float64(), lambda n: n * 7 % 41 / 8),
    "decimals": (pa.decimal128(9, 2), lambda n: decimal.Decimal(n) / 4),
    "booleans": (pa.bool_(), lambda n: n % 2 == 0),
    "yes and no": (pa.string(), lambda n: ("yes", "no")[n % 2]),
    "timestamps": (pa.timestamp("us"), lambda n: _DAY + datetime.timedelta(hours=n * 7 % 41)),
    "dates in a format": (pa.string(), lambda n: f"{1 + n % 28:02}.{1 + n // 28:02}.2024"),
    "percentages": (pa.string(), lambda n: f"{n * 7 % 41}.5%"),
    "decimal commas": (pa.string(), lambda n: f"{n * 7 % 41},57"),
    "bytes": (pa.binary(), lambda n: b"%d" % n),
    "nulls": (pa.null(), lambda _: None),
    "NA": (pa.string(), lambda _: "NA"),
    "blanks": (pa.string(), lambda _: "  "),
    "NaN": (pa.float64(), lambda _: float("nan")),
    "infinities": (pa.float64(), lambda _: float("inf")),
}
SHAPES: dict[str, Callable[[Callable[[int], Any]], list[Any]]] = {
    "no value": lambda _: [None] * ROWS,
    "one row": lambda value: [value(1)],
    "one row without a value": lambda _: [None],
    "one value": lambda value: [None, value(1), *[None] * (ROWS - 2)],
    "equal values": lambda value: [value(1)] * ROWS,
    "different values": lambda value: [value(n) for n in range(ROWS)],
}


def written(folder: Path, name: str, shape: str) -> Path:
    """Write a table with the column `c`, two other inputs, and a target of each kind."""
    kind, value = TYPES[name]
    cells = SHAPES[shape](value)
    rows = range(len(cells))
    columns = {
        "x": pa.array([n * 11 % 17 / 4 for n in rows]),
        "c": pa.array(cells, kind),
        "kind": pa.array(["uv"[n * n % 3 % 2] for n in rows]),
        "size": pa.array([n * 13 % 19 / 2 for n in rows]),
    }
    pq.write_table(pa.table(columns), folder / "t.parquet")
    return folder / "t.parquet"


def proposed(path: Path, task: str, target: str) -> ProjectProposal | None:
    """Return the proposal, or None if it is refused."""
    try:
        proposal = propose(inspect(path), task, target, machine=LAPTOP)
    except SlipwayError:
        return None
    assert proposal.text()
    return proposal


def clean_and_fit(params: Mapping[str, Any], **changes: Any) -> None:
    """Clean the table, and fit its columns to all rows and to none; any refusal is fine."""
    checked = parse_params(dict(params))
    data = checked.data.model_copy(update=changes)
    try:
        table = clean_table(read_table_of(data), data, checked.clean)
        if table.cleaned.rows.num_rows:
            table_report(table, data, checked.clean)
        for training in (np.ones, np.zeros):
            is_training = training(table.cells.num_rows, bool)
            contract = fit_columns(table.cells, is_training, table.types, checked.precompute)
            encode_cells(table.cells, contract)
    except SlipwayError:
        return


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TYPES)
def test_a_column_of_few_values_is_used_or_refused_in_every_role(
    name: str, shape: str, tmp_path: Path
) -> None:
    path = written(tmp_path, name, shape)
    for target, task in (
        ("kind", "table_classification"),
        ("size", "table_regression"),
        ("c", "table_classification"),
        ("c", "table_regression"),
        ("c", "table_multilabel"),
        ("kind", "text_classification"),
    ):
        proposal = proposed(path, task, target)
        if proposal is None or task.startswith("text"):
            continue
        clean_and_fit(proposal.params)
        if target == "size":
            for role in ("group_column", "time_column", "weight_column", "split_column"):
                clean_and_fit(proposal.params, **{role: "c"})
            for kind in ("number", "category", "date", "boolean"):
                clean_and_fit(proposal.params, columns={"c": said(kind)})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TYPES)
def test_every_statistic_of_a_sampled_column_has_a_value(
    name: str, shape: str, tmp_path: Path
) -> None:
    cells = pq.read_table(written(tmp_path, name, shape))["c"]
    for column in sampled_columns([stored_column("c", without_lists(cells))]):
        for statistic in vars(SampledColumn):
            getattr(column, statistic)
        target_kinds(column)


@pytest.mark.parametrize("rows", [0, 1, 20, 40])
@pytest.mark.parametrize("of_classes", [True, False])
def test_a_column_of_one_value_is_no_copy_of_any_target(rows: int, of_classes: bool) -> None:
    for cells in (pa.nulls(rows, pa.float64()), pa.array([1.0] * rows), pa.array(["a"] * rows)):
        for targets in (np.arange(rows, dtype=np.float64) % 2, np.zeros(rows)):
            best = best_score(pa.chunked_array([cells]), targets, of_classes=of_classes)
            assert best is None or best[0] < SUSPICIOUS


def test_init_names_the_column_of_bytes_that_are_no_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="If the column 'c' holds no images, write the table with"):
        inspect(written(tmp_path, "bytes", "different values"))


@pytest.mark.parametrize("name", ["words", "NA", "blanks", "nulls", "NaN", "floats", "timestamps"])
def test_init_names_a_column_without_any_value_as_empty(name: str, tmp_path: Path) -> None:
    shape = "no value" if TYPES[name][1](0) is not None else "equal values"
    proposal = proposed(written(tmp_path, name, shape), "table_classification", "kind")
    assert proposal is not None
    warnings = "\n".join(proposal.warnings)
    assert "columns that the model will not read: 'c' (it is empty: no row has a value)" in warnings


def test_init_names_the_empty_column_that_a_comma_at_the_end_of_each_line_makes(
    tmp_path: Path,
) -> None:
    rows = "".join(f"{n * 11 % 17},{'uv'[n % 2]},\n" for n in range(ROWS))
    (tmp_path / "t.csv").write_text("x,kind,\n" + rows)
    proposal = proposed(tmp_path / "t.csv", "table_classification", "kind")
    assert proposal is not None
    assert "'' (it is empty: no row has a value)" in "\n".join(proposal.warnings)


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ("no value", "the column 'c' is empty; expected a value in most rows"),
        ("equal values", "'c' has one value, 'word01', in every row; expected at least two diff"),
    ],
)
def test_init_refuses_a_target_without_different_values(
    shape: str, fault: str, tmp_path: Path
) -> None:
    with pytest.raises(ParamsError, match=fault):
        propose(inspect(written(tmp_path, "words", shape)), None, "c", machine=LAPTOP)
