"""Tests of packing: the same bytes for any number of workers and interruptions."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from slipway.data.engine.rows import SPLIT_ROWS
from slipway.data.engine.work_folder import work_folder
from slipway.data.sources.samples import Fault, RawSample
from slipway.data.store.packed import open_split, read_manifest
from slipway.data.store.packing import channel_statistics, pack, packing_key
from slipway.data.store.store_form import StoreForm
from slipway.inputs.images import array_from_bytes
from slipway.kinds.registry import Task
from slipway.system import files
from slipway.system.errors import DataError, IntegrityError
from tests.data.pictures import CONTRACT, picture, pixels, sample

RAW = StoreForm(network=CONTRACT, train_size_px=CONTRACT.size_px, encoding="raw", jpeg_quality=None)


def data_set(count: int, task: Task = "image_classification") -> tuple[list[RawSample], pa.Table]:
    samples = [sample(str(seed), picture(seed, 12)) for seed in range(count)]
    rows = [_row(entry, index, task) for index, entry in enumerate(samples)]
    return samples, pa.Table.from_pylist(rows, schema=SPLIT_ROWS)


def _row(entry: RawSample, index: int, task: Task) -> dict[str, Any]:
    sha256 = files.sha256_bytes(entry.payload)
    answer = (
        {"label": "ba"[index % 2], "target": None}
        if task == "image_classification"
        else {"label": None, "target": float(index)}
    )
    facts: dict[str, Any] = {
        "group": None,
        "width": 12,
        "height": 12,
        "bytes": len(entry.payload),
        "sha256": sha256,
        "flags": [],
        "corrections": [],
        "leaked": False,
    }
    return {
        "id": sha256[:32],
        "source": entry.source,
        **answer,
        **facts,
        "split": ("train", "train", "val", "test")[index % 4],
    }


def write(
    root: Path,
    samples: list[RawSample],
    rows: pa.Table,
    num_workers: int = 1,
    task: Task = "image_classification",
    form: StoreForm = RAW,
    asked: list[str] | None = None,
) -> dict[str, str]:
    """Pack into `root`; return the digests of its files, and add the sources read to `asked`."""

    def read(sources: Collection[str]) -> Iterator[RawSample]:
        for entry in samples:
            if entry.source in sources:
                if asked is not None:
                    asked.append(entry.source)
                yield entry

    with work_folder(root.parent / "work", packing_key(rows, form, task), "packing") as work:
        assert sum(1 for _ in pack(read, rows, form, task, work, num_workers)) == rows.num_rows
        files.move_directory(work / "store", root)
    return digests_below(root)


def digests_below(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): files.sha256_file(path)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_every_packed_image_has_its_id_and_class(tmp_path: Path) -> None:
    samples, rows = data_set(20)
    write(tmp_path / "packed", samples, rows)
    manifest = read_manifest(tmp_path / "packed")
    assert manifest.classes == ["a", "b"]
    expected = {row["id"]: row for row in rows.to_pylist()}
    for name in ("train", "val", "test"):
        split = open_split(tmp_path / "packed", manifest, name, verify=True)
        assert split.ids == sorted(
            sample_id for sample_id, row in expected.items() if row["split"] == name
        )
        for index, sample_id in enumerate(split.ids):
            row = expected[sample_id]
            assert manifest.classes[int(split.targets[index])] == row["label"]
            assert split.sources[index] == row["source"]
            assert np.array_equal(
                split.inputs[index], array_from_bytes(samples[int(row["source"])].payload, CONTRACT)
            )


def test_packing_does_not_depend_on_the_order_of_samples_and_rows(tmp_path: Path) -> None:
    samples, rows = data_set(20)
    expected = write(tmp_path / "a", samples, rows)
    assert write(tmp_path / "b", samples[::-1], rows.take(list(range(20))[::-1])) == expected


@pytest.mark.process
def test_packing_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    samples, rows = data_set(700)
    assert write(tmp_path / "one", samples, rows, 1) == write(tmp_path / "two", samples, rows, 2)


def test_the_same_folder_can_be_packed_twice_in_one_process(tmp_path: Path) -> None:
    samples, rows = data_set(20)
    assert write(tmp_path / "packed", samples, rows) == write(tmp_path / "packed", samples, rows)


def test_channel_statistics_are_computed_from_the_training_split_only(tmp_path: Path) -> None:
    write(tmp_path / "packed", *data_set(20))
    manifest = read_manifest(tmp_path / "packed")
    train = open_split(tmp_path / "packed", manifest, "train").inputs[:].astype(np.float64) / 255
    everything = [
        open_split(tmp_path / "packed", manifest, name).inputs[:]
        for name in ("train", "val", "test")
    ]
    assert manifest.mean == pytest.approx(train.mean((0, 1, 2)).tolist(), abs=1e-12)
    assert manifest.std == pytest.approx(train.std((0, 1, 2)).tolist(), abs=1e-12)
    assert manifest.mean != pytest.approx(
        (np.concatenate(everything) / 255).mean((0, 1, 2)).tolist(), abs=1e-6
    )


def test_channel_statistics_over_several_chunks_are_exact() -> None:
    images = np.stack([pixels(seed, 4) for seed in range(600)])
    mean, std = channel_statistics(images)
    assert mean == pytest.approx((images / 255).mean((0, 1, 2)).tolist(), abs=1e-12)
    assert std == pytest.approx((images / 255).std((0, 1, 2)).tolist(), abs=1e-12)
    assert channel_statistics(images[::-1]) == (mean, std)


def test_a_constant_channel_has_no_standard_deviation_of_zero() -> None:
    assert channel_statistics(np.full((2, 4, 4, 1), 255, np.uint8)) == ([1.0], [1 / 255])


def test_a_numeric_target_is_packed_with_its_scale(tmp_path: Path) -> None:
    samples, rows = data_set(20, "image_regression")
    write(tmp_path / "packed", samples, rows, task="image_regression")
    manifest = read_manifest(tmp_path / "packed")
    targets = open_split(tmp_path / "packed", manifest, "train").targets
    assert manifest.classes == []
    assert manifest.target_scale is not None
    assert (manifest.target_scale.mean, manifest.target_scale.std) == pytest.approx(
        (targets.mean(), targets.std())
    )
    assert sorted(targets) == [index for index in range(20) if index % 4 < 2]


def test_a_constant_numeric_target_is_refused(tmp_path: Path) -> None:
    samples, rows = data_set(8, "image_regression")
    constant = rows.set_column(rows.schema.get_field_index("target"), "target", pa.array([3.0] * 8))
    with pytest.raises(DataError, match="all 4 targets of the training split are 3"):
        write(tmp_path / "packed", samples, constant, task="image_regression")


def altered(samples: list[RawSample]) -> Iterator[RawSample]:
    for entry in samples:
        if entry.source == "3":
            yield sample("3", picture(99, 12))
        elif entry.source == "4":
            yield RawSample("4", b"", None, None, None, Fault("missing_file", "it went away"))
        elif entry.source != "5":
            yield entry


def test_error_names_all_altered_and_missing_images_and_leaves_no_store(tmp_path: Path) -> None:
    samples, rows = data_set(20)
    with pytest.raises(IntegrityError) as raised:
        write(tmp_path / "packed", list(altered(samples)), rows)
    text = str(raised.value)
    assert "3 of 20 images changed since they were cleaned" in text
    assert "3: SHA-256" in text
    assert "4: it went away" in text
    assert "5: it no longer exists" in text
    assert not (tmp_path / "packed").exists()


def test_a_failed_packing_keeps_the_previous_store(tmp_path: Path) -> None:
    samples, rows = data_set(20)
    expected = write(tmp_path / "packed", samples, rows)
    with pytest.raises(IntegrityError):
        write(tmp_path / "packed", samples[1:], rows)
    assert {name: files.sha256_file(tmp_path / "packed" / name) for name in expected} == expected


class Killed(BaseException):
    """An exception for the end of the process, which no `except` of ours may catch."""


def pack_and_stop(
    root: Path, samples: list[RawSample], rows: pa.Table, after: int, form: StoreForm = RAW
) -> None:
    """Pack until `after` samples are read, then stop and leave the unfinished work."""

    def read(_: Collection[str]) -> Iterator[RawSample]:
        yield from samples[:after]
        raise Killed

    with (
        pytest.raises(Killed),
        work_folder(
            root.parent / "work", packing_key(rows, form, "image_classification"), "packing"
        ) as work,
    ):
        list(pack(read, rows, form, "image_classification", work, 1))


JPEG_FORM = StoreForm(network=CONTRACT, train_size_px=16, encoding="jpeg", jpeg_quality=90)


@pytest.mark.parametrize("form", [RAW, JPEG_FORM], ids=["raw", "jpeg"])
def test_an_interrupted_packing_resumes_to_the_same_result(
    tmp_path: Path, form: StoreForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.data.store.shards.SHARD_ROWS", 8)
    monkeypatch.setattr("slipway.data.engine.parallel._CHUNK_ITEMS", 4)
    samples, rows = data_set(60)
    (tmp_path / "a").mkdir()
    expected = write(tmp_path / "a" / "packed", samples, rows, form=form)
    pack_and_stop(tmp_path / "packed", samples, rows, 40, form)
    assert not (tmp_path / "packed").exists()
    asked: list[str] = []
    assert write(tmp_path / "packed", samples, rows, form=form, asked=asked) == expected
    assert set(map(str, range(40, 60))) <= set(asked)
    assert len(asked) <= 24
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["lock"]


@pytest.mark.parametrize("damage", ["pixels", "jpeg", "marker", "half a marker"])
def test_a_resumed_packing_rebuilds_a_damaged_shard(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.data.store.shards.SHARD_ROWS", 8)
    monkeypatch.setattr("slipway.data.engine.parallel._CHUNK_ITEMS", 4)
    samples, rows = data_set(60)
    (tmp_path / "a").mkdir()
    expected = write(tmp_path / "a" / "packed", samples, rows, form=JPEG_FORM)
    pack_and_stop(tmp_path / "packed", samples, rows, 60, JPEG_FORM)
    work = next(path for path in (tmp_path / "work").iterdir() if path.is_dir())
    path = {
        "pixels": work / "store" / "val" / "inputs.npy",
        "jpeg": work / "shards" / "000002.jpeg",
    }.get(damage, work / "shards" / "000002.json")
    payload = bytearray(path.read_bytes())
    if damage == "half a marker":
        path.write_bytes(payload[: len(payload) // 2])
    else:
        payload[-300 if damage != "marker" else payload.index(b"numbers") + 16] ^= 1
        path.write_bytes(payload)
    asked: list[str] = []
    assert write(tmp_path / "packed", samples, rows, form=JPEG_FORM, asked=asked) == expected
    assert len(asked) == 8


def test_slow_rows_are_recorded_after_a_time_limit_before_their_shard_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipway.data.engine.parallel._CHUNK_ITEMS", 4)
    samples, rows = data_set(40)
    markers = {}
    for name, seconds in {"by_rows": 3600.0, "by_time": 0.0}.items():
        monkeypatch.setattr("slipway.data.store.shards.SHARD_SECONDS", seconds)
        (tmp_path / name).mkdir()
        pack_and_stop(tmp_path / name / "packed", samples, rows, after=24)
        markers[name] = len(list((tmp_path / name).rglob("shards/*.json")))
        assert write(tmp_path / name / "packed", samples, rows)
    assert markers["by_rows"] == 1  # what was begun when the work stopped
    assert markers["by_time"] >= 20
    assert digests_below(tmp_path / "by_rows" / "packed") == digests_below(
        tmp_path / "by_time" / "packed"
    )


def test_changed_params_remove_the_old_work_and_start_again(tmp_path: Path) -> None:
    samples, rows = data_set(20)
    pack_and_stop(tmp_path / "packed", samples, rows, 20)
    old = {path.name for path in (tmp_path / "work").iterdir() if path.is_dir()}
    asked: list[str] = []
    write(tmp_path / "packed", samples, rows, form=JPEG_FORM, asked=asked)
    assert len(asked) == 20
    assert old.isdisjoint(path.name for path in (tmp_path / "work").iterdir())


def test_work_of_another_version_of_the_code_is_removed_and_never_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moved module of the decoding code changes its digest, just as changed content does."""
    samples, rows = data_set(20)
    with monkeypatch.context() as old_code:
        old_code.setattr("slipway.data.store.packing.pixel_code", lambda: "digest before the move")
        pack_and_stop(tmp_path / "packed", samples, rows, 20)
    old = {path.name for path in (tmp_path / "work").iterdir() if path.is_dir()}
    assert len(old) == 1
    asked: list[str] = []
    write(tmp_path / "packed", samples, rows, asked=asked)
    assert len(asked) == 20
    assert old.isdisjoint(path.name for path in (tmp_path / "work").iterdir())


def test_the_packing_key_depends_on_rows_form_and_task_but_not_on_row_order() -> None:
    _, rows = data_set(20)
    key = packing_key(rows, RAW, "image_classification")
    assert packing_key(rows.take(list(range(20))[::-1]), RAW, "image_classification") == key
    others = {
        packing_key(rows.slice(1), RAW, "image_classification"),
        packing_key(rows, JPEG_FORM, "image_classification"),
        packing_key(rows, RAW, "image_regression"),
    }
    assert len(others | {key}) == 4


def test_training_images_may_be_stored_larger_than_validation_and_test_images(
    tmp_path: Path,
) -> None:
    samples, rows = data_set(20)
    write(tmp_path / "packed", samples, rows, form=RAW.model_copy(update={"train_size_px": 12}))
    manifest = read_manifest(tmp_path / "packed")
    assert manifest.input == CONTRACT
    assert {name: split.shape for name, split in manifest.splits.items()} == {
        "train": [12, 12, 3],
        "val": [8, 8, 3],
        "test": [8, 8, 3],
    }
    train = open_split(tmp_path / "packed", manifest, "train", verify=True)
    expected = array_from_bytes(
        samples[int(train.sources[0])].payload, CONTRACT.model_copy(update={"size_px": 12})
    )
    assert np.array_equal(train.inputs[0], expected)


def test_only_training_images_are_lossy_and_statistics_are_of_stored_pixels(
    tmp_path: Path,
) -> None:
    samples, rows = data_set(40)
    write(tmp_path / "packed", samples, rows, form=JPEG_FORM)
    manifest = read_manifest(tmp_path / "packed")
    for name in ("val", "test"):
        split = open_split(tmp_path / "packed", manifest, name, verify=True)
        assert all(
            np.array_equal(
                split.inputs[index], array_from_bytes(samples[int(source)].payload, CONTRACT)
            )
            for index, source in enumerate(split.sources)
        )
    train = open_split(tmp_path / "packed", manifest, "train", verify=True).inputs
    assert train.shape == (20, 16, 16, 3)
    assert manifest.mean == pytest.approx((train[:] / 255).mean((0, 1, 2)).tolist(), abs=1e-12)
    assert manifest.std == pytest.approx((train[:] / 255).std((0, 1, 2)).tolist(), abs=1e-12)
