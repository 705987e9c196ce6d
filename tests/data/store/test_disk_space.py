"""Tests of the disk space for a packed store: exact for pixels, estimated for JPEGs."""

import shutil
from pathlib import Path

import pytest

from slipway.data.store import disk_space
from slipway.data.store.disk_space import Need, check_disk_space, check_jpeg_space, space_needed
from slipway.data.store.store_form import StoreForm
from slipway.system.errors import UnavailableError
from tests.data.pictures import CONTRACT

COUNTS = {"train": 700, "val": 200, "test": 100}
NETWORK = CONTRACT.model_copy(update={"size_px": 100})
MIB = 2**20


def form(encoding: str, train_size_px: int = 100, quality: int = 90) -> StoreForm:
    return StoreForm.model_validate(
        {
            "network": NETWORK,
            "train_size_px": train_size_px,
            "encoding": encoding,
            "jpeg_quality": quality,
        }
    )


def test_the_space_for_raw_pixels_is_computed_exactly() -> None:
    small, large = space_needed(form("raw"), COUNTS), space_needed(form("raw", 200), COUNTS)
    assert large.store - small.store == 700 * (200 * 200 - 100 * 100) * 3
    assert 0 <= small.store - 1000 * 100 * 100 * 3 < 70 * MIB
    assert not small.is_estimate


def test_the_estimated_space_for_jpegs_grows_with_size_and_quality_and_includes_shards() -> None:
    needs = [
        space_needed(form("jpeg", *setting), COUNTS)
        for setting in ((100, 50), (100, 95), (200, 95))
    ]
    assert all(need.is_estimate for need in needs)
    assert (
        needs[0].store
        < needs[1].store
        < needs[2].store
        < space_needed(form("raw", 200), COUNTS).store
    )
    assert needs[2].temporary > 700 * 200 * 200 * 0.5


def test_too_little_disk_space_is_refused_with_the_settings_to_change(tmp_path: Path) -> None:
    check_disk_space(Need(1, 1, is_estimate=False), tmp_path, tmp_path / "packed")
    with pytest.raises(
        UnavailableError,
        match=r"needs 1,073,741,824 MiB in .*, [\d,]+ MiB are free. .* "
        "set precompute.encoding to jpeg",
    ):
        check_disk_space(Need(2**50, 0, is_estimate=False), tmp_path, tmp_path / "packed")
    with pytest.raises(
        UnavailableError,
        match=r"needs an estimated 1,073,741,824 MiB .* lower precompute.jpeg_quality",
    ):
        check_disk_space(Need(2**50, 0, is_estimate=True), tmp_path, tmp_path / "packed")


def test_the_content_of_the_work_folder_counts_as_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 3 * MIB})())
    need = Need(4 * MIB, 0, is_estimate=False)
    with pytest.raises(UnavailableError):
        check_disk_space(need, tmp_path, tmp_path / "packed")
    (tmp_path / "inputs.npy").write_bytes(b"\1" * 2 * MIB)
    check_disk_space(need, tmp_path, tmp_path / "packed")


def test_a_target_on_another_disk_needs_space_for_a_copy_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, target = tmp_path / "work", tmp_path / "target"
    work.mkdir()
    target.mkdir()
    room = {work: 10 * MIB, target: 10 * MIB}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: type("Usage", (), {"free": room[place]})()
    )
    need = Need(5 * MIB, 0, is_estimate=False)
    room[target] = MIB
    check_disk_space(need, work, target / "packed")
    monkeypatch.setattr(disk_space, "_device", str)
    with pytest.raises(UnavailableError, match=f"in {target}, 1 MiB are free"):
        check_disk_space(need, work, target / "packed")


def test_check_jpeg_space_refuses_remaining_jpegs_that_exceed_the_free_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1024 * MIB})())
    check_jpeg_space(100, 100 * MIB, 400, tmp_path)  # 2 * 400 + 100 MiB and the margin
    with pytest.raises(
        UnavailableError, match=r"1,048,576 bytes each; the 500 that are left .* about 1,164 MiB"
    ):
        check_jpeg_space(100, 100 * MIB, 500, tmp_path)
