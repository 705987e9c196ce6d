"""Batches come from the memory map many times faster than from files.

`bench/loading.py` measures the factor on photographs. The floors are less than half of the usual
factors, for busy machines. A factor below its floor means that images are decoded again, processed
pixel by pixel, copied once more, or processed in one thread.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slipway.data.augmentation.plan import plan_from_params
from slipway.system.files import sha256_bytes
from slipway.system.malloc import keep_freed_pages
from slipway.training.batches.batches import (
    ImageChanges,
    TrainingBatches,
    cut_step,
    training_loader,
)
from tests.packed_rows import packed_split
from tests.project_params import augment_params


def write_pictures(folder: Path, count: int, width: int, height: int) -> None:
    """Write JPEGs of smooth noise, as large on disk as photographs."""
    generator = np.random.default_rng(0)
    (folder / "one").mkdir(parents=True)
    for number in range(count):
        coarse = Image.fromarray(
            generator.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
        )
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(
            folder / "one" / f"{number}.jpg", quality=90
        )


def image_folder(folder: Path, transform: Any, batch_size: int) -> Callable[[], int]:
    """Return a function that loads all images with torchvision, on two processes."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder  # type: ignore[import-untyped]

    loader = DataLoader(
        ImageFolder(str(folder), transform),
        batch_size,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
    )
    return lambda: sum(len(images) for images, _ in loader)


def slipway(
    stored_px: int, size_px: int, count: int, batch_size: int, path: Path, **operations: Any
) -> Callable[[], int]:
    """Return a function that loads all images with the training loader over a memory map."""
    keep_freed_pages()  # as training does
    np.save(
        path,
        np.random.default_rng(0).integers(0, 256, (count, stored_px, stored_px, 3), dtype=np.uint8),
    )
    ids = [sha256_bytes(str(number).encode())[:32] for number in range(count)]
    split = packed_split(np.load(path, mmap_mode="r"), np.zeros(count), ids, ids)
    changes = ImageChanges(
        plan_from_params(augment_params(horizontal_flip=0.5, **operations), 7),
        size_px,
        on_device=False,
    )
    loader = training_loader(
        TrainingBatches(
            [split], cut_step(batch_size, 1, batch_size), 0, 7, changes, target_dtype="int64"
        ),
        0,
    )
    return lambda: sum(len(batch.inputs) for batch in loader)


def rate(epoch: Callable[[], int], seconds: float) -> float:
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        count += epoch()
    return count / (time.perf_counter() - begin)


def times_faster(ours: Callable[[], int], theirs: Callable[[], int]) -> float:
    """Return the median ratio of both loading speeds in five rounds, after a warm-up."""
    ours(), theirs()
    ratios = [rate(ours, 0.4) / rate(theirs, 0.8) for _ in range(5)]
    print("times as fast:", " ".join(f"{ratio:.0f}" for ratio in ratios))
    return statistics.median(ratios)


@pytest.mark.nightly
def test_crops_of_224_px_load_at_least_eight_times_as_fast_as_from_files(tmp_path: Path) -> None:
    from torchvision import transforms  # type: ignore[import-untyped]

    write_pictures(tmp_path / "images", 256, 400, 300)
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
    )
    ours = slipway(256, 224, 256, 64, tmp_path / "inputs.npy", random_resized_crop=[0.08, 1.0])
    assert times_faster(ours, image_folder(tmp_path / "images", transform, 64)) > 8


@pytest.mark.nightly
def test_images_of_28_px_load_at_least_thirty_times_as_fast_as_from_files(tmp_path: Path) -> None:
    from torchvision import transforms

    write_pictures(tmp_path / "images", 2048, 28, 28)
    transform = transforms.Compose(
        [transforms.RandomCrop(28, 4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    ours = slipway(28, 28, 2048, 256, tmp_path / "inputs.npy", crop_padding_px=4)
    assert times_faster(ours, image_folder(tmp_path / "images", transform, 256)) > 30
