"""Tests of offline copies: only training rows are copied, with own ids, and reproducibly."""

from pathlib import Path

import numpy as np
import pytest

from slipway.data.augmentation.plan import open_augmented, plan_from_params, write_plan
from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.system import files
from slipway.system.errors import IntegrityError, SchemaError
from slipway.training.augmentation.offline_copies import copy_id, write_copies
from tests.data.pictures import CONTRACT, pixels
from tests.packed_rows import packed_split
from tests.project_params import augment_params

PLAN = plan_from_params(
    augment_params(
        rotation_deg=20.0,
        scale=[0.8, 1.2],
        crop_padding_px=2,
        horizontal_flip=0.5,
        vertical_flip=0.5,
        brightness=0.2,
    ),
    seed=7,
)
IDS = [files.sha256_bytes(str(seed).encode())[:32] for seed in range(10)]
TRAIN = packed_split(
    np.stack([pixels(seed, CONTRACT.size_px) for seed in range(10)]),
    targets=np.array([0.0, 1.0] * 5),
    ids=IDS,
    sources=[str(seed) for seed in range(10)],
)
MANIFEST = PackedManifest(
    format_version=3,
    task="image_classification",
    input=CONTRACT,
    classes=["a", "b"],
    mean=[0.5],
    std=[0.5],
    target_scale=None,
    splits={},
)


def write(root: Path, size_px: int = CONTRACT.size_px) -> PackedSplit:
    with files.new_directory(root) as folder:
        write_plan(
            folder,
            PLAN.model_copy(
                update={"offline": write_copies(TRAIN, PLAN, 3, size_px, folder / "train")}
            ),
        )
    plan, copies = open_augmented(root, MANIFEST)
    assert plan.offline is not None
    assert copies is not None
    return copies


def test_each_offline_copy_of_a_row_has_its_own_id(tmp_path: Path) -> None:
    copies = write(tmp_path / "augmented")
    assert len(copies) == 30
    assert len({*copies.ids, *IDS}) == 40
    assert copies.ids[:10] == [copy_id(sample_id, 1) for sample_id in IDS]
    assert copies.sources == TRAIN.sources * 3
    assert copies.targets.tolist() == TRAIN.targets.tolist() * 3


def test_all_offline_copies_of_an_image_differ(tmp_path: Path) -> None:
    copies = write(tmp_path / "augmented")
    everything = np.concatenate([TRAIN.inputs, copies.inputs])
    assert len({image.tobytes() for image in everything}) == 40


def test_equal_inputs_make_equal_offline_copies(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    assert (tmp_path / "a" / "plan.json").read_bytes() == (
        tmp_path / "b" / "plan.json"
    ).read_bytes()


def test_offline_copies_that_do_not_fit_the_plan_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "augmented")
    np.save(tmp_path / "augmented" / "train" / "inputs.npy", TRAIN.inputs[:])
    with pytest.raises(SchemaError, match="expected 30"):
        open_augmented(tmp_path / "augmented", MANIFEST)


def test_an_altered_offline_copy_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "augmented")
    path = tmp_path / "augmented" / "train" / "inputs.npy"
    payload = bytearray(path.read_bytes())
    payload[-1] ^= 1
    path.write_bytes(payload)
    with pytest.raises(IntegrityError, match=r"inputs\.npy was altered"):
        open_augmented(tmp_path / "augmented", MANIFEST, verify=True)
