"""Tests of merging multi-label rows: their set of labels is merged like a single label."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.merge.__main__ import merge
from slipway.data.sources.raw_tables import COLLECTED
from slipway.data.sources.sources import read_samples
from tests.data import raw_files
from tests.data.merge.merge_cases import counts
from tests.data.pictures import IMAGE_TYPE, data_params, picture
from tests.data.raw_files import cleaned

SETS: tuple[list[str], ...] = (["car", "dog"], ["car"], ["dog"], [])


def written(labels: list[str], form: str) -> Any:
    """Return the cell of a label set in a notation that a column of lists may have."""
    texts = {"list": labels, "json": str(labels).replace("'", '"'), "text": "|".join(labels)}
    return texts[form] if labels or form != "text" else "[]"


def base_rows(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return 60 rows with two inputs; the cells of the label are used in turn."""
    return [
        {"a": (7 * row) % 61 + 0.5, "b": f"{row % 3}", **cells[row % len(cells)]}
        for row in range(60)
    ]


@pytest.mark.parametrize("form", ["list", "json", "text"])
def test_merging_a_column_of_label_lists_keeps_the_label_sets(tmp_path: Path, form: str) -> None:
    rows = base_rows([{"tags": written(labels, form)} for labels in SETS])
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "old.parquet")
    new = {
        "a": [0.5, 7.5, 100.5],
        "b": ["0", "1", "2"],
        # As row 0 has it in another order; another set than row 1 has; a new row.
        "tags": ['["dog", "car"]', '["dog"]', '["bird"]'],
    }
    pq.write_table(pa.table(new), tmp_path / "new.parquet")
    params: dict[str, Any] = {"task": "table_multilabel", "target": "tags", "label_separator": "|"}
    data = raw_files.data_params(tmp_path / "old.parquet", **params)
    out = tmp_path / "next.parquet"
    report = merge(data, tmp_path / "new.parquet", out)
    assert counts(report) == (60, 2, 1, 0)
    assert report.conflicts == ["1"]
    labels = cleaned(raw_files.data_params(out, **params)).cleaned.rows["label"].to_pylist()
    assert labels.count('["car", "dog"]') == 15
    assert labels.count('["bird"]') == 1

    pq.write_table(pa.table(new | {"tags": [None, None, '["car"]']}), tmp_path / "new.parquet")
    again = merge(raw_files.data_params(out, **params), tmp_path / "new.parquet", out)
    assert again.num_relabelled == 1, "the new row has another set now"
    assert again.num_added == 0


@pytest.mark.parametrize(
    ("yes", "no"), [(True, False), ("yes", "no"), (1, 0)], ids=["booleans", "words", "numbers"]
)
def test_merging_true_false_label_columns_keeps_one_column_per_label(
    tmp_path: Path, yes: Any, no: Any
) -> None:
    cells = [{name: yes if name in own else no for name in ("car", "dog")} for own in SETS]
    pq.write_table(pa.Table.from_pylist(base_rows(cells)), tmp_path / "old.parquet")
    new = {"a": [0.5, 7.5, 100.5], "b": ["0", "1", "2"]}
    flags = {"car": [True, False, None], "dog": [True, True, None]}
    pq.write_table(pa.table(new | flags), tmp_path / "new.parquet")
    columns: dict[str, Any] = {"task": "table_multilabel", "target_column": ["car", "dog"]}
    data = raw_files.data_params(tmp_path / "old.parquet", **columns)
    out = tmp_path / "next.parquet"
    report = merge(data, tmp_path / "new.parquet", out)
    assert counts(report) == (60, 2, 1, 0)
    assert report.conflicts == ["1"]
    found = cleaned(raw_files.data_params(out, **columns))
    labels = found.cleaned.rows["label"].to_pylist()
    assert set(labels) == {'["car", "dog"]', '["car"]', '["dog"]', "[]"}
    rules = [row["rule"] for row in found.cleaned.quarantine.to_pylist()]
    assert sorted(rules) == ["conflicting_label", "conflicting_label", "missing_label"]


def test_merging_images_keeps_their_label_sets(tmp_path: Path) -> None:
    def table(seeds: range, labels: list[Any]) -> pa.Table:
        images = pa.array([{"bytes": picture(seed), "path": None} for seed in seeds], IMAGE_TYPE)
        return pa.table({"image": images, "tags": labels})

    pq.write_table(table(range(4), list(SETS)), tmp_path / "old.parquet")
    new = ['["car"]', '["dog"]', '["car"]']
    pq.write_table(table(range(2, 5), new), tmp_path / "new.parquet")
    data = data_params(tmp_path / "old.parquet", task="image_multilabel", target_column="tags")
    out = tmp_path / "next.parquet"
    report = merge(data, tmp_path / "new.parquet", out)
    assert (report.num_base, report.num_added, report.num_duplicates) == (4, 3, 0)
    assert len(report.conflicts) == 2, "other sets of labels: both rows are kept"
    merged = data.model_copy(update={"path": str(out)})
    found = [one.label for one in read_samples(merged)]
    assert found == ['["car", "dog"]', '["car"]', '["dog"]', "[]", *new]
    assert pq.read_table(out)[COLLECTED].to_pylist() == [False] * 4 + [True] * 3
