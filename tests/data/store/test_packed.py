"""Tests of reading the packed store: memory-mapped arrays, and checks against the manifest."""

from pathlib import Path

import numpy as np
import pytest

from slipway.data.store.packed import (
    PackedManifest,
    PackedSplitManifest,
    open_split,
    read_manifest,
    write_manifest,
    write_split,
)
from slipway.system import files
from slipway.system.errors import IntegrityError, SchemaError
from tests.data.pictures import CONTRACT, pixels
from tests.packed_rows import packed_rows

IDS = [files.sha256_bytes(str(seed).encode())[:32] for seed in range(3)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "train").mkdir()
    np.save(tmp_path / "train" / "inputs.npy", np.stack([pixels(seed) for seed in range(3)]))
    split = write_split(
        tmp_path / "train", packed_rows(IDS, ["a", "b", "c"], [0, 1, 0]), CONTRACT.shape
    )
    write_manifest(tmp_path, _manifest(split))
    return tmp_path


def _manifest(split: PackedSplitManifest) -> PackedManifest:
    return PackedManifest(
        format_version=3,
        task="image_classification",
        input=CONTRACT,
        classes=["x", "y"],
        mean=[0.5] * 3,
        std=[0.2] * 3,
        target_scale=None,
        splits={"train": split},
    )


def test_opening_a_split_maps_its_arrays_without_reading_them(store: Path) -> None:
    split = open_split(store, read_manifest(store), "train", verify=True)
    assert isinstance(split.inputs, np.memmap)
    assert not split.inputs.flags.writeable
    assert (split.ids, split.sources, split.targets.tolist()) == (IDS, ["a", "b", "c"], [0, 1, 0])
    assert [hex(key)[2:].zfill(16) for key in split.keys.tolist()] == [
        sample_id[:16] for sample_id in IDS
    ]


@pytest.mark.parametrize("name", ["inputs.npy", "rows.parquet"])
def test_opening_a_split_with_an_altered_file_is_refused(store: Path, name: str) -> None:
    payload = bytearray((store / "train" / name).read_bytes())
    payload[-20] ^= 1
    (store / "train" / name).write_bytes(payload)
    with pytest.raises(IntegrityError, match=f"{name} was altered"):
        open_split(store, read_manifest(store), "train", verify=True)


def test_opening_a_split_with_images_of_a_different_shape_is_refused(store: Path) -> None:
    np.save(store / "train" / "inputs.npy", np.zeros((3, 8, 8, 1), np.uint8))
    with pytest.raises(SchemaError, match=r"has inputs \(3, 8, 8, 1\)"):
        open_split(store, read_manifest(store), "train")


def test_pickled_images_are_never_loaded(store: Path) -> None:
    np.save(store / "train" / "inputs.npy", np.array([{}] * 3), allow_pickle=True)
    with pytest.raises(SchemaError, match="not a readable array"):
        open_split(store, read_manifest(store), "train")


def test_opening_a_split_without_its_images_is_refused(store: Path) -> None:
    (store / "train" / "inputs.npy").unlink()
    with pytest.raises(SchemaError, match="not a readable array"):
        open_split(store, read_manifest(store), "train")


def test_error_for_a_missing_manifest_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="dvc repro precompute"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("words", "is not JSON"),
        ("{}", "has format version None, this Slipway reads version 3"),
        ('{"format_version": 3}', "is not a valid PackedManifest"),
    ],
)
def test_a_malformed_manifest_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(SchemaError, match=reason):
        read_manifest(tmp_path)
