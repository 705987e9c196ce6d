"""Tests of the output of the stage `augment` for images, larger stored images and tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.data.augmentation.plan import AugmentPlan, open_augmented
from slipway.data.store import packed
from slipway.data.store.packed import PackedManifest, TargetScale
from slipway.inputs.columns import Column, ColumnContract
from slipway.inputs.contract import InputContract
from stages import augment
from tests.data.augmentation.test_plan import ON
from tests.packed_rows import packed_rows
from tests.project_params import PROJECT, augment_params
from tests.training.conftest import CONTRACT, split_of

COLUMN = Column(
    name="a",
    kind="number",
    min=None,
    max=None,
    required=False,
    has_missing=False,
    categories=[],
    mean=0,
    std=1,
    fill=0,
    quantiles=[],
)  # fmt: skip


def write_packed(root: Path, inputs: Any, contract: InputContract) -> PackedManifest:
    """Write a packed store with only a training split."""
    table, folder, rows = (
        isinstance(contract, ColumnContract),
        root / "data/packed",
        split_of(len(inputs)),
    )
    (folder / "train").mkdir(parents=True)
    np.save(folder / "train/inputs.npy", inputs)
    split = packed.write_split(
        folder / "train", packed_rows(rows.ids, rows.sources, rows.targets), inputs.shape[1:]
    )
    manifest = PackedManifest(
        format_version=3,
        task="table_regression" if table else "image_classification",
        input=contract,
        classes=[] if table else ["above", "below"],
        mean=[] if table else [0.5],
        std=[] if table else [0.5],
        target_scale=TargetScale(mean=0, std=1) if table else None,
        splits={"train": split},
    )
    packed.write_manifest(folder, manifest)
    return manifest


def run(
    root: Path, manifest: PackedManifest, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[AugmentPlan, Any]:
    """Run the stage `augment` and open its output."""
    monkeypatch.chdir(root)
    augment.run(PROJECT.model_copy(update={"augment": augment_params(**changes)}))
    assert (root / "reports/augment.png").read_bytes().startswith(b"\x89PNG")
    return open_augmented(root / "data/augmented", manifest, verify=True)


def test_augment_stage_reports_that_tables_are_not_augmented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = write_packed(
        tmp_path, np.zeros((5, 1), np.float32), ColumnContract(kind="columns", columns=[COLUMN])
    )
    plan, copies = run(
        tmp_path, manifest, monkeypatch, rotation_deg=10.0, mixup_alpha=0.2, offline_copies=2
    )
    assert plan.is_identity
    assert copies is None
    assert (
        "only images are augmented: without effect are rotation_deg, mixup_alpha, offline_copies"
        in capsys.readouterr().out
    )


@pytest.mark.process
@pytest.mark.parametrize("stored_px", [8, 12])
def test_offline_copies_have_the_size_of_their_stored_images(
    tmp_path: Path,
    stored_px: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, stored_px, stored_px, 1), dtype=np.uint8)
    plan, copies = run(
        tmp_path, write_packed(tmp_path, images, CONTRACT), monkeypatch, **ON, offline_copies=2
    )
    assert copies.inputs.shape == (12, stored_px, stored_px, 1)
    assert plan.offline is not None
    printed = capsys.readouterr().out
    assert "without effect on grey images: saturation, hue" in printed
    assert "offline copies are not mixed" in printed
    assert "offline copies of each training row: 2" in printed


def test_augment_notes_larger_stored_images_that_are_never_cropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = write_packed(tmp_path, np.zeros((3, 12, 12, 1), np.uint8), CONTRACT)
    assert run(tmp_path, manifest, monkeypatch)[0].is_identity
    assert "stored with 12 px and only shrunk to 8 px" in capsys.readouterr().out
