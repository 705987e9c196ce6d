"""A file of JSON lines may hold one JSON array; both are read alike."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipway.data.erasure.rows import find_group
from slipway.data.sources.formats import json_lines
from slipway.data.sources.formats.json_lines import json_columns, json_records
from slipway.data.sources.raw_tables import read_raw_table
from slipway.inference.sources import TableFile
from slipway.project import table_sample
from slipway.project.table_sample import sample_table
from slipway.system.errors import DataError
from tests.data.raw_files import data_params
from tests.inference.test_sources import UTF8, frame, write_jsonl
from tests.serving.bundles import COLUMNS

ROWS: list[dict[str, Any]] = [
    {"x": 1, "text": 'a "]," in a text\n', "nested": [{"y": [1, 2]}]},
    {"x": 2.5, "text": "ä\u2028猫", "nested": []},
    {"x": None, "text": "[{", "nested": None},
]


@pytest.fixture(params=[1, 7, 1 << 22], name="block")
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Read in pieces of this size, the smallest of which cut the array at every place."""
    monkeypatch.setattr(json_lines, "_START_CHARACTERS", 12)
    monkeypatch.setattr(json_lines, "_BLOCK_CHARACTERS", request.param)
    return int(request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("mark", ["", "\ufeff", "\n  "])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_one_array_is_read_like_one_object_per_line(
    tmp_path: Path, indent: int | None, mark: str, is_ascii: bool
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(mark + json.dumps(ROWS, indent=indent, ensure_ascii=is_ascii) + "\n")
    assert list(json_records(path)) == ROWS
    assert json_columns(path) == ["x", "text", "nested"]


@pytest.mark.usefixtures("block")
def test_an_element_that_is_no_object_is_a_malformed_row(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('[{"x": 1}, 12, "a", null, [3], {"x": 2}]')
    table = read_raw_table(path)
    assert [number for number, _ in table.malformed] == [1, 2, 3, 4]
    assert table.columns["x"].values.to_pylist() == [1.0, 2.0]


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('[{"x": 1}, {"x": 2} ', 2),
        ('[{"x": 1}, {"x": ', 1),
        ('[{"x": 1} {"x": 2}]', 1),
        ('[{"x": 1},, {"x": 2}]', 1),
        ('[{"x": 1}]\n[{"x": 2}]', 1),
        ('[{"x": 1}] x', 1),
        ("[{", 0),
    ],
)
def test_an_array_that_is_damaged_is_refused_with_the_place(
    tmp_path: Path, text: str, number: int
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=f"one JSON array, which is damaged after {number} element"):
        read_raw_table(path)


def test_lines_that_are_arrays_of_numbers_stay_malformed_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('[1, 2]\n{"x": 1}\n')
    assert list(json_records(path)) == [None, {"x": 1}]


def test_an_empty_array_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("[ ]\n")
    assert list(json_records(path)) == []


def test_a_large_array_is_sampled_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_sample, "_SAMPLE_BYTES", 2000)
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps([{"x": n + 100, "y": "a"} for n in range(800)], indent=1))
    sample = sample_table(path)
    assert not sample.is_exact
    assert 50 < sample.raw.num_read < 200
    assert 400 < sample.num_rows < 1600
    assert [*sample.raw.columns] == ["x", "y"]


def test_an_array_is_predicted_like_lines(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "lines.jsonl", frame(20))
    path = tmp_path / "array.jsonl"
    path.write_text(json.dumps(frame(20).to_pylist(), indent=2))
    one, other = (list(TableFile(COLUMNS, each, UTF8).pieces(0, 8, 8)) for each in (path, lines))
    for piece, expected in zip(one, other, strict=True):
        texts = [piece.carried["row"].to_pylist(), expected.carried["row"].to_pylist()]
        assert [json.loads(text) for text in texts[0]] == [json.loads(text) for text in texts[1]]
        assert not any("\n" in text for text in texts[0])
        batches = zip(piece.batches, expected.batches, strict=True)
        assert all((found == wanted).all() for (_, found), (_, wanted) in batches)


def test_rows_of_an_array_are_not_erased_because_the_others_would_be_written_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('[{"x": 1, "person": "a"}]')
    data = data_params(path, group_column="person")
    with pytest.raises(DataError, match="is one JSON array, expected one object per line"):
        find_group(path, data, frozenset("a"))
