"""Numbers with other marks than -1234.5, from `slipway init` to the prediction of a file."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml

from slipway.config.params import parse_params
from slipway.config.sections import DataParams
from slipway.data.sources.text_format import TextFormat
from slipway.data.tables.cleaning import CleanedTable
from slipway.data.tables.packing import fit_columns
from slipway.inference.rows import RowReader
from slipway.inference.sources import TableFile
from slipway.inputs.columns import ColumnContract
from slipway.project.inspection import inspect
from slipway.project.proposal import ProjectProposal, propose
from slipway.project.recipe import Machine
from slipway.system.errors import CellError
from tests.data.raw_files import cleaned
from tests.project_params import PROJECT

LAPTOP = Machine(cores=2, has_gpu=False, has_amx=False)
QUIET = {"near_duplicate": None, "conflicting_label": None}
NO_BREAK, NARROW = "\u00a0", "\u202f"
# (decimal mark, mark between thousands) in the file, and what the proposal has to say of the second
NOTATIONS = [
    (",", ".", "."),
    (",", " ", " "),
    (",", NO_BREAK, " "),
    (",", NARROW, " "),
    (",", "'", "'"),
    (".", "'", "'"),
    (".", "\u2019", "'"),
    (".", ",", ","),
    (",", "", None),
]


def written(value: float, decimal: str, thousands: str, digits: int = 2) -> str:
    return f"{value:,.{digits}f}".translate({ord(","): thousands, ord("."): decimal})


def prices(num_rows: int = 120) -> list[tuple[float, float, float]]:
    """Return prices, discounts and targets with few digits."""
    draw = random.Random(1)
    return [
        (
            round(draw.uniform(10, 9000), 2),
            round(draw.uniform(0, 30), 1),
            round(draw.uniform(-5e6, 5e6), 2),
        )
        for _ in range(num_rows)
    ]


def table(path: Path, decimal: str, thousands: str) -> Path:
    lines = ["price;discount;colour;target"] + [
        f"{written(price, decimal, thousands)} €;{written(discount, decimal, thousands, 1)} %;"
        f"{'rgb'[row % 3]};{written(target, decimal, thousands)}"
        for row, (price, discount, target) in enumerate(prices())
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def proposal_of(path: Path, target: str = "target") -> ProjectProposal:
    return propose(inspect(path), target=target, machine=LAPTOP)


def section(proposal: ProjectProposal) -> DataParams:
    return parse_params(dict(proposal.params)).data


def contract_of(table: CleanedTable, data: DataParams) -> ColumnContract:
    rows = np.ones(table.cells.num_rows, bool)
    fitted = fit_columns(table.cells, rows, table.types, PROJECT.precompute)
    marks = {"decimal": data.decimal, "thousands": data.thousands}
    return fitted.model_copy(update=marks | {"ignored": table.ignored})


@pytest.mark.parametrize(("decimal", "thousands", "proposed"), NOTATIONS)
def test_what_init_proposes_for_the_marks_of_numbers_lets_clean_read_the_same_values(
    tmp_path: Path, decimal: str, thousands: str, proposed: str | None
) -> None:
    data = section(proposal_of(table(tmp_path / "t.csv", decimal, thousands)))
    assert (data.decimal, data.thousands) == (decimal, proposed)
    assert data.task == "table_regression"
    found = cleaned(data, rules=QUIET)
    kept = {int(row["source"]): row for row in found.cleaned.rows.to_pylist()}
    cells = dict(zip(found.cells["slipway_id"].to_pylist(), found.cells.to_pylist(), strict=True))
    for row, (price, discount, target) in enumerate(prices()):
        own = cells[kept[row]["id"]]
        assert (own["price"], own["discount"]) == (price, discount)
        assert kept[row]["target"] == target


@pytest.mark.parametrize(("decimal", "thousands", "proposed"), NOTATIONS)
def test_predicting_a_file_reads_numbers_as_training_did_and_requests_stay_json_numbers(
    tmp_path: Path, decimal: str, thousands: str, proposed: str | None
) -> None:
    path = table(tmp_path / "t.csv", decimal, thousands)
    data = section(proposal_of(path))
    assert data.thousands == proposed
    contract = contract_of(cleaned(data, rules=QUIET), data)
    rows = [
        {"price": price, "discount": discount, "colour": "rgb"[row % 3]}
        for row, (price, discount, _target) in enumerate(prices())
    ]
    sent = np.concatenate([*RowReader(contract).read(rows, 64)[0]])
    piece = next(TableFile(contract, path, TextFormat()).pieces(0, 200, 200))
    ((_, from_file),) = piece.batches
    assert not piece.faults
    np.testing.assert_array_equal(from_file, sent)
    frame = pd.read_csv(path, sep=";", dtype=str)
    from_frame = np.concatenate([*RowReader(contract).read(frame, 64)[0]])
    np.testing.assert_array_equal(from_frame, sent)


def test_init_names_the_unit_of_each_column_of_numbers(tmp_path: Path) -> None:
    warnings = proposal_of(table(tmp_path / "t.csv", ",", ".")).warnings
    price, discount, _ = prices()[0]
    assert [text for text in warnings if "has the unit" in text] == [
        f"'price' has the unit €: '{written(price, ',', '.')} €' is read as {price:g}, and the "
        f"service takes {price:g}",
        f"'discount' has the unit %: '{written(discount, ',', '.', 1)} %' is read as {discount:g}, "
        f"and the service takes {discount:g}",
    ]


@pytest.mark.parametrize(
    ("cells", "decimal", "thousands"),
    [
        (["1.234,56", "12,5"], ",", "."),
        (["1 234,56", "2,25"], ",", " "),
        (["12,5 %", "3,25 %"], ",", None),
        (["1'234.50", "2'000"], ".", "'"),
        (["-0,1257", "3,5"], ",", None),
    ],
)
def test_the_remedy_that_clean_proposes_for_other_marks_makes_the_column_an_input(
    tmp_path: Path, cells: list[str], decimal: str, thousands: str | None
) -> None:
    data = two_columns(tmp_path, cells * 30)
    before = cleaned(data, rules=QUIET)
    assert "a" in before.ignored
    (hint,) = before.hints[-1:]
    lines = yaml.safe_load(hint.partition("params.yaml:\n")[2])
    assert lines == {"decimal": decimal, "thousands": thousands}
    (reason,) = (column.note for column in before.columns if column.name == "a")
    assert f"data.decimal to '{decimal}'" in reason
    after = cleaned(data.model_copy(update=lines), rules=QUIET)
    assert {column.name: column.kind for column in after.types}["a"] == "number"
    assert not after.hints


def test_clean_proposes_no_marks_for_numbers_that_it_reads(tmp_path: Path) -> None:
    assert not cleaned(two_columns(tmp_path, ["1,234,567", "1,000", "2.5"] * 20), rules=QUIET).hints


def two_columns(folder: Path, cells: Sequence[str], **changes: Any) -> DataParams:
    path = folder / "t.csv"
    lines = [f'"{cell}";{row % 7};{row % 11}' for row, cell in enumerate(cells)]
    path.write_text("\n".join(["a;b;target", *lines, ""]))
    values = PROJECT.data.model_dump() | {"path": str(path), "task": "table_regression"}
    return DataParams.model_validate(values | {"target_column": "target"} | changes)


def test_numbers_that_may_mean_two_things_are_not_read_until_the_params_say_which(
    tmp_path: Path,
) -> None:
    cells = [f"{row % 9 + 1},{(row * 37) % 900 + 100}" for row in range(60)]
    data = two_columns(tmp_path, cells)
    proposal = proposal_of(Path(data.path))
    assert "decimal" not in proposal.reasons
    (warning,) = (text for text in proposal.warnings if "will not read" in text)
    assert "'1,100', which may be 1.1 or 1100" in warning
    for decimal, thousands, value in ((",", None, 1.1), (".", ",", 1100)):
        assert f"data.decimal to '{decimal}'" in warning
        marks = {"decimal": decimal, "thousands": thousands}
        found = cleaned(data.model_copy(update=marks), rules=QUIET)
        assert min(found.cells["a"].to_pylist()) == value


@pytest.mark.parametrize(
    ("thousands", "candidates"), [(",", ("comma", "point")), (".", ("point", "comma"))]
)
def test_init_asks_for_the_decimal_mark_of_a_target_that_may_mean_two_things(
    tmp_path: Path, thousands: str, candidates: tuple[str, ...]
) -> None:
    values = [f"{row * row + 10:,}".replace(",", thousands) for row in range(80)]
    rows = [f"{row / 7:.0f};{value}" for row, value in enumerate(values)]
    (tmp_path / "t.csv").write_text("\n".join(["a;target", *rows, ""]))
    (question,) = proposal_of(tmp_path / "t.csv").questions
    assert (question.option, question.candidates) == ("--decimal", candidates)
    assert "which may be" in question.text
    as_thousands = "point" if thousands == "," else "comma"
    for decimal in candidates:
        summary = inspect(tmp_path / "t.csv")
        proposal = propose(summary, target="target", decimal=decimal, machine=LAPTOP)
        found = cleaned(section(proposal), rules=QUIET).cleaned.rows["target"].to_pylist()
        assert (max(found) == 6251) if decimal == as_thousands else (max(found) < 1000)


def test_init_warns_of_points_that_look_like_marks_of_thousands(tmp_path: Path) -> None:
    cells = [f"{row * row + 10:,} €".replace(",", ".") for row in range(80)]
    proposal = proposal_of(Path(two_columns(tmp_path, cells).path))
    (warning,) = (text for text in proposal.warnings if "decimal point" in text)
    assert "'1.034 €', which may be 1.034 or 1034" in warning
    assert "set data.decimal to ',' and data.thousands to '.'" in warning


def test_a_cell_with_other_marks_than_its_column_is_refused_and_not_read_as_another_number(
    tmp_path: Path,
) -> None:
    odd = ["1,234.56", "1.23", "0.123", "1234.5", "1.234.56"]
    cells = [f"{row}.{row % 9}00,5" for row in range(1, 99)]
    data = two_columns(tmp_path, [*cells, *odd], decimal=",", thousands=".")
    found = cleaned(data, rules=QUIET | {"outlier": None})
    refused = found.cleaned.quarantine
    assert refused["rule"].to_pylist() == ["type_violation"] * len(odd)
    assert all(any(repr(cell) in text for text in refused["detail"].to_pylist()) for cell in odd)


@pytest.mark.parametrize("cell", ["12.5 %", "$12"])
def test_a_file_with_another_unit_than_the_training_data_is_refused(
    tmp_path: Path, cell: str
) -> None:
    data = two_columns(tmp_path, [f"{row % 17}.5 €" for row in range(60)])
    table = cleaned(data, rules=QUIET)
    contract = contract_of(table, data)
    given = pa.table({"a": [cell, cell], "b": [1, 2]})
    with pytest.raises(
        CellError, match=r"rows\[0\].a: found .* expected a finite number as '7.5 €'"
    ):
        [*RowReader(contract).read(given, 8)[0]]
    plain = pa.table({"a": ["12.5", "3"], "b": [1, 2]})
    assert len([*RowReader(contract).read(plain, 8)[0]]) == 1


def test_numbers_among_the_text_of_json_lines_keep_their_value(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        json.dumps({"a": f"{row},5" if row % 2 == 0 else row + 0.234, "b": row % 7, "target": row})
        for row in range(60)
    ]
    path.write_text("\n".join(rows))
    data = two_columns(tmp_path, ["1"], decimal=",", thousands=".")
    found = cleaned(data.model_copy(update={"path": str(path)}), rules=QUIET)
    assert sorted(found.cells["a"].to_pylist())[:4] == [0.5, 1.234, 2.5, 3.234]
