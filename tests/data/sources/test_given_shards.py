"""The names of Parquet shards give the split of their rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipway.data.sources.raw_tables import column_names, read_raw_table
from slipway.data.sources.samples import GIVEN_SPLIT
from slipway.data.sources.sources import read_samples
from slipway.data.tables.source import find_table
from tests.data.pictures import IMAGE_TYPE, data_params, picture
from tests.data.sources.split_folders import described, read, refusal

# Parquet shards


def write_shard(path: Path, seeds: list[int], **columns: list[Any]) -> Path:
    images = pa.array([{"bytes": picture(seed), "path": None} for seed in seeds], IMAGE_TYPE)
    labels = ["ab"[seed % 2] for seed in seeds]
    pq.write_table(pa.table({"image": images, "label": labels, **columns}), path)
    return path


def test_shards_as_the_hub_names_them_are_the_given_split(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00000-of-00002.parquet", [1, 2])
    write_shard(tmp_path / "train-00001-of-00002.parquet", [3])
    write_shard(tmp_path / "test-00000-of-00001.parquet", [4])
    samples = read(tmp_path)
    assert [(sample.source, sample.given_split) for sample in samples] == [
        ("0", "test"),
        ("1", "train"),
        ("2", "train"),
        ("3", "train"),
    ]
    assert [sample.payload for sample in read_samples(data_params(tmp_path), ["3"])] == [picture(3)]
    assert (
        "train-00000-of-00002.parquet + train-00001-of-00002.parquet -> train (3 rows)"
        in described(tmp_path)
    )


def test_clean_reports_that_a_missing_val_is_cut_by_time(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00000-of-00001.parquet", [1, 2], day=[1.0, 2.0])
    write_shard(tmp_path / "test-00000-of-00001.parquet", [3], day=[3.0])
    assert "; `split` cuts val from train by time. " in described(tmp_path, time_column="day")
    assert "; `split` cuts val from train. " in described(tmp_path)


def test_a_clone_of_the_hub_is_read_as_the_shards_in_its_only_folder(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / ".gitattributes").write_text("*.parquet filter=lfs")
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data" / "train-00000-of-00001.parquet", [1, 2])
    write_shard(tmp_path / "data" / "test-00000-of-00001.parquet", [3])
    samples = read(tmp_path)
    assert [(sample.label, sample.given_split) for sample in samples] == [
        ("b", "test"),
        ("b", "train"),
        ("a", "train"),
    ]
    assert find_table(data_params(tmp_path, task="table_classification")) == tmp_path / "data"


def test_an_only_folder_with_images_beside_tables_is_a_class(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    write_shard(tmp_path / "cat" / "notes.parquet", [1])
    (tmp_path / "cat" / "1.png").write_bytes(picture(1))
    assert [sample.label for sample in read(tmp_path)] == ["cat", "cat"]


@pytest.mark.parametrize(
    "names", [("part-0", "part-1"), ("train-00000-of-00002", "train-00001-of-00002")]
)
def test_shards_that_name_fewer_than_two_splits_are_one_table(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    for seed, name in enumerate(names):
        write_shard(tmp_path / f"{name}.parquet", [seed])
    assert [(sample.source, sample.given_split) for sample in read(tmp_path)] == [
        ("0", None),
        ("1", None),
    ]


def test_error_names_shards_with_different_columns(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.parquet", [1])
    write_shard(tmp_path / "b.parquet", [2], size=[3])
    pq.write_table(pa.table({"image": [b""], "label": [1]}), tmp_path / "c.parquet")
    text = refusal(tmp_path)
    assert "b.parquet: also has size" in text
    assert "c.parquet: image is binary, not struct" in text
    assert "  a.parquet: " not in text


def test_error_names_a_missing_shard(tmp_path: Path) -> None:
    write_shard(tmp_path / "train-00000-of-00003.parquet", [1])
    write_shard(tmp_path / "train-00002-of-00003.parquet", [2])
    assert "lacks the shards train-00001-of-00003" in refusal(tmp_path)


def test_a_shard_without_a_split_beside_others_is_refused_or_pooled(tmp_path: Path) -> None:
    for seed, name in enumerate(("train", "test", "unsupervised")):
        write_shard(tmp_path / f"{name}-00000-of-00001.parquet", [seed])
    assert "unsupervised-00000-of-00001.parquet name no split" in refusal(tmp_path)
    assert [sample.given_split for sample in read(tmp_path, split_folders="pool")] == [None] * 3


def test_the_shards_of_a_table_are_joined_with_the_split_that_their_names_give(
    tmp_path: Path,
) -> None:
    pq.write_table(
        pa.table({"a": [1.0, 2.0], "target": [1, 2]}), tmp_path / "train-00000-of-00001.parquet"
    )
    pq.write_table(pa.table({"a": [3.0], "target": [3]}), tmp_path / "test-00000-of-00001.parquet")
    table = find_table(data_params(tmp_path, task="table_regression"))
    assert column_names(table) == ["a", "target"]
    raw = read_raw_table(table)
    given = raw.columns[GIVEN_SPLIT]
    assert given.values.take(pa.array(given.codes)).to_pylist() == ["test", "train", "train"]
    assert raw.columns["a"].values.take(pa.array(raw.columns["a"].codes)).to_pylist() == [
        3.0,
        1.0,
        2.0,
    ]
    assert list(read_raw_table(table, ["a"]).columns) == ["a"]


def test_a_split_column_overrides_the_names_of_shards(tmp_path: Path) -> None:
    write_shard(tmp_path / "train.parquet", [1], part=["test"])
    write_shard(tmp_path / "test.parquet", [2], part=["train"])
    assert [sample.given_split for sample in read(tmp_path, split_column="part")] == [
        "train",
        "test",
    ]
