"""Tests of the verdicts on rows: all verdicts on one row are in the same part."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from slipway.data.tables import ledger
from slipway.data.tables.ledger import Ledger

DETAILS = [(5, "b"), (1, "a"), (5, "a"), (3, "c"), (0, "a"), (5, "b"), (1, "c"), (4, "a")]


def found(num_parts: int) -> dict[str, pa.Table]:
    numbers = np.array([0, 1, 3, 4, 7, 8])
    own = Ledger(numbers, lambda number: f"row {number}")
    for place, (row, detail) in enumerate(DETAILS):
        own.apply("flag", f"rule {detail}", [(row, f"{place}{detail}")])
    for place, (row, detail) in enumerate(DETAILS[:num_parts]):
        own.apply("refuse", f"fault {detail}", [(row, f"{place}{detail}")])
    return {
        "flags": own.flags(),
        "flagged": own.flagged_rows(),
        "quarantine": own.quarantine([(5, "short"), (2, "long")]),
    }


def test_verdicts_are_grouped_by_row_in_the_order_of_the_rules() -> None:
    tables = found(4)
    assert tables["flags"]["row"].to_pylist() == [0, 1, 1, 3, 4, 5, 5]
    assert tables["flags"]["text"].to_pylist()[-2:] == ["rule a", "rule b"]
    kept = tables["flagged"].select(["source", "rule", "detail"]).to_pylist()
    assert kept == [
        {"source": "row 0", "rule": "rule a", "detail": "4a"},
        {"source": "row 7", "rule": "rule a", "detail": "7a"},
    ]
    refused = tables["quarantine"].select(["source", "rule", "detail"]).to_pylist()
    assert [tuple(row.values()) for row in refused] == [
        ("row 1", "fault a", "1a"),
        ("row 8", "fault b", "0b; 2a"),
        ("row 4", "fault c", "3c"),
        ("row 2", "malformed_row", "long"),
        ("row 5", "malformed_row", "short"),
    ]


def test_verdicts_stored_in_many_parts_give_the_same_tables_as_in_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = found(3)
    monkeypatch.setattr(ledger, "_GROUPED_VERDICTS", 2)
    assert all(table.equals(expected[name]) for name, table in found(3).items())
    assert found(0)["quarantine"].num_rows == 2
