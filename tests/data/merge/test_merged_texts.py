"""Tests of merging texts that the service received into a table or a folder of text files."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.config.sections import DataParams
from slipway.data.merge.__main__ import merge, next_command
from slipway.data.sources.raw_tables import COLLECTED
from slipway.data.texts.cleaning import clean_texts
from tests.project_params import PROJECT, clean_params

pytestmark = pytest.mark.unit
OLD = [("ham", "see you at noon"), ("spam", "free prize, call 0900"), ("ham", "2024-05-06")]


def data_of(path: Path, **changes: Any) -> DataParams:
    own = {"path": str(path), "task": "text_classification", "text_columns": ["text"]}
    return PROJECT.data.model_copy(update=own | changes)


def collected(path: Path, rows: Sequence[tuple[str | None, str]]) -> Path:
    """Write collected texts in the format of `slipway dataset collect`."""
    columns = {
        "text": pa.array([text for _, text in rows], pa.string()),
        "label": pa.array([label for label, _ in rows], pa.string()),
    }
    pq.write_table(pa.table(columns), path)
    return path


def test_merge_adds_new_texts_once_and_keeps_other_columns(tmp_path: Path) -> None:
    base = tmp_path / "texts.csv"
    with base.open("w", newline="") as file:
        csv.writer(file).writerows([("label", "text", "site"), *((*row, "a") for row in OLD)])
    new = [("ham", "see you at noon"), ("ham", "free prize, call 0900"), (None, "6 May 2024")]
    out = tmp_path / "next.parquet"
    report = merge(data_of(base), collected(tmp_path / "new.parquet", new), out)
    assert (report.num_base, report.num_added, report.num_duplicates) == (3, 2, 1)
    assert report.conflicts == ["1"]
    table = pq.read_table(out)
    assert table["text"].to_pylist()[3:] == ["free prize, call 0900", "6 May 2024"]
    assert table["label"].to_pylist()[3:] == ["ham", None]
    assert table["site"].to_pylist()[:3] == ["a"] * 3
    assert table[COLLECTED].to_pylist() == [False] * 3 + [True] * 2


def test_merge_of_a_folder_of_text_files_writes_a_table_with_its_split(tmp_path: Path) -> None:
    for number, (label, text) in enumerate([*OLD, *OLD]):
        place = tmp_path / "old" / ("train" if number < 3 else "test") / label
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.txt").write_text(f"{text} {number}")
    (tmp_path / "old/train/ham/x.bin").write_bytes(b"binary\0")
    data, out = data_of(tmp_path / "old"), tmp_path / "next.parquet"
    new = [("spam", "free prize, call 0900 1"), ("ham", "a new text")]
    report = merge(data, collected(tmp_path / "new.parquet", new), out)
    assert (report.num_base, report.num_added, report.num_duplicates) == (6, 1, 1)
    assert "x.bin has NUL bytes" in report.omitted[0]
    assert next_command(data, out).endswith(" data.split_column=slipway_split")
    after = data_of(out, split_column="slipway_split")
    rows = clean_texts(after, clean_params()).cleaned.rows.to_pylist()
    assert sorted(row["given_split"] for row in rows) == ["test"] * 3 + ["train"] * 4
