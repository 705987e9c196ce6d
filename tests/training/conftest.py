"""A small project for training: images of 8 px in two classes, bright above or bright below."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from slipway.data.augmentation.plan import plan_from_params, write_plan
from slipway.data.store import packed
from slipway.inputs.images import ImageContract
from slipway.system import files
from slipway.training.networks.networks import NetworkSpec
from tests.packed_rows import packed_rows, packed_split
from tests.project_params import augment_params, own_content

ROOT = Path(__file__).parents[2]
ARGUMENTS = {
    "width": 16,
    "blocks": [1, 1],
    "dropout": 0.1,
    "stochastic_depth": 0.0,
    "normalisation": "batch",
}
CONTRACT = ImageContract(
    kind="images",
    transform=None,
    size_px=8,
    channels=1,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10_000,
)


def spec(**changes: Any) -> NetworkSpec:
    values = {
        "task": "image_classification",
        "name": "small_resnet",
        "arguments": ARGUMENTS,
        "classes": ["above", "below"],
        "input": CONTRACT,
        "mean": [0.5],
        "std": [0.25],
        "target_scale": None,
    }
    return NetworkSpec(**{**values, **changes})


def split_of(num_rows: int, start: int = 0) -> packed.PackedSplit:
    """Return rows whose ids have another order than their positions."""
    generator = np.random.default_rng(start)
    targets = generator.integers(0, 2, num_rows)
    images = generator.integers(0, 160, (num_rows, 8, 8, 1), dtype=np.uint8)
    for image, target in zip(images, targets, strict=True):
        image[4 * target : 4 * target + 4] += 60
    ids = [files.sha256_bytes(f"{start + row}".encode())[:32] for row in range(num_rows)]
    return packed_split(images, targets, ids, ids)


def write_project(root: Path, **train: Any) -> Path:
    """Write a project for `python -m slipway.stages.train`, with `train` in its params."""
    splits: dict[str, packed.PackedSplitManifest] = {}
    for name, num_rows in {"train": 150, "val": 61}.items():
        split, folder = split_of(num_rows, 1000 * len(splits)), root / "data/packed" / name
        folder.mkdir(parents=True)
        np.save(folder / "inputs.npy", split.inputs[:])
        splits[name] = packed.write_split(
            folder, packed_rows(split.ids, split.sources, split.targets), split.inputs.shape[1:]
        )
    manifest = packed.PackedManifest(
        format_version=3,
        task="image_classification",
        input=CONTRACT,
        classes=["above", "below"],
        mean=[0.42],
        std=[0.2],
        target_scale=None,
        splits=splits,
    )
    packed.write_manifest(root / "data/packed", manifest)
    operations = {
        "rotation_deg": 5.0,
        "scale": [0.9, 1.1],
        "horizontal_flip": 0.5,
        "erasing": 0.2,
        "brightness": 0.1,
    }
    plan = plan_from_params(
        augment_params(**operations, mixup_alpha=0.2, cutmix_alpha=1.0, mix_probability=0.5), seed=7
    )
    write_plan(root / "data/augmented", plan)
    params = own_content()
    settings = {
        "network_arguments": ARGUMENTS,
        "epochs": 4,
        "batch_size": 32,
        "learning_rate": 0.01,
        "warmup_epochs": 1.0,
        "checkpoint_every_epochs": 1,
        "devices": 1,
        "accelerator": "cpu",
    }
    params["train"].update(settings, **train)
    files.write_text(root / "params.yaml", yaml.dump(params, Dumper=yaml.CSafeDumper))
    return root


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path)
