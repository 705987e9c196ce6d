"""Slipway's side of `bench.loading`: the loader that training uses, on the packed store."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from bench.loading_rounds import CASES, Case, serve
from slipway.data.augmentation.plan import AugmentPlan, plan_from_params
from slipway.data.store.packed import PackedSplit
from slipway.inputs.images import ImageContract, array_from_bytes
from slipway.system.files import sha256_bytes
from slipway.system.malloc import keep_freed_pages
from slipway.training.batches.batches import (
    ImageChanges,
    TrainingBatches,
    cut_step,
    training_loader,
)
from tests.project_params import augment_params


def pack(case: Case, folder: Path) -> PackedSplit:
    """Pack the images below `folder` as `precompute` does, and map them into memory."""
    path, pictures = folder / "inputs.npy", sorted((folder / "images").rglob("*.jpg"))
    contract = ImageContract(
        kind="images",
        transform=None,
        size_px=case.stored_px,
        channels=3,
        resize_mode="stretch",
        interpolation="bilinear",
        max_pixels=10**6,
    )
    if not path.exists():
        unfinished = folder / f"inputs-{os.getpid()}.npy"  # two processes may pack at once
        np.save(
            unfinished,
            np.stack([array_from_bytes(picture.read_bytes(), contract) for picture in pictures]),
        )
        unfinished.replace(path)
    names = [picture.name for picture in pictures]
    ids = [sha256_bytes(name.encode())[:32] for name in names]
    targets = np.array([float(picture.parent.name) for picture in pictures])
    return PackedSplit(
        np.load(path, mmap_mode="r"),
        targets,
        ids,
        names,
        np.ones(len(ids)),
        np.zeros(len(ids), dtype=bool),
    )


def plan_of(case: Case) -> AugmentPlan:
    """Return the plan of flips and the crop of the case."""
    if case.padding_px:
        return plan_from_params(
            augment_params(horizontal_flip=0.5, crop_padding_px=case.padding_px), 7
        )
    return plan_from_params(augment_params(horizontal_flip=0.5, random_resized_crop=[0.08, 1.0]), 7)


def epochs(case: Case, folder: Path, num_workers: int) -> Callable[[], Iterator[int]]:
    """Return a function that starts an epoch, with the number of images of each batch."""
    keep_freed_pages()  # as training does
    batches = TrainingBatches(
        [pack(case, folder)],
        cut_step(case.batch_size, 1, case.batch_size),
        rank=0,
        seed=7,
        changes=ImageChanges(plan_of(case), case.size_px, on_device=False),
        target_dtype="int64",
    )
    loader, number = training_loader(batches, num_workers), iter(range(10**9))

    def epoch() -> Iterator[int]:
        loader.sampler.set_epoch(next(number))  # type: ignore[attr-defined]
        return (_checked(batch.inputs, case) for batch in loader)

    return epoch


def _checked(inputs: torch.Tensor, case: Case) -> int:
    assert inputs.shape[1:] == (case.size_px, case.size_px, 3)
    assert inputs.dtype == torch.uint8
    return len(inputs)


if __name__ == "__main__":
    serve(lambda: epochs(CASES[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3])))
