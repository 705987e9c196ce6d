"""Computes the disk space that a packed store needs, before the store is written.

The size of pixels is exact. The size of JPEGs depends on the images: it is estimated at first, and
later computed from the finished JPEGs.
"""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from slipway.data.store.store_form import StoreForm
from slipway.system.errors import UnavailableError

_MARGIN_BYTES = 64 << 20  # space for the tables and the file system itself
_ROW_BYTES = 1 << 10  # generous size of a row in the tables and markers
_JPEG_HEADER_BYTES = 700
# Bytes per pixel by quality: more than photographs at 224 px need (bench/results/precompute.md),
# less than noise needs.
_JPEG_QUALITIES = (1, 50, 75, 90, 95, 100)
_JPEG_BYTES_PER_PIXEL = (0.1, 0.25, 0.4, 0.6, 0.8, 2.0)
_OTHER_FORM = {False: "set precompute.encoding to jpeg", True: "lower precompute.jpeg_quality"}


class Need(NamedTuple):
    """The bytes that a store needs, and the further bytes that packing needs temporarily."""

    store: int
    temporary: int
    is_estimate: bool


def space_needed(form: StoreForm, num_rows: Mapping[str, int]) -> Need:
    """Return the space for a store with `num_rows` rows in each split."""
    pixels = jpegs = 0
    for split, rows in num_rows.items():
        if form.is_jpeg(split):
            jpegs += rows * _jpeg_bytes(form, split)
        else:
            pixels += rows * math.prod(form.stored(split).shape)
    tables = sum(num_rows.values()) * _ROW_BYTES
    return Need(pixels + jpegs + tables + _MARGIN_BYTES, jpegs + tables, is_estimate=jpegs > 0)


def check_disk_space(need: Need, work: Path, target: Path) -> None:
    """Raise UnavailableError if the store does not fit on the disks of `work` and `target`.

    The store is made in `work` and then moves to `target`. The content of `work` counts as free
    space, because packing resumes from it.
    """
    folder = _existing(target.parent)
    _check(need.store + need.temporary - _allocated(work), work, need.is_estimate)
    if _device(work) != _device(folder):  # on one device the store is moved, not copied
        _check(need.store, folder, need.is_estimate)


def check_jpeg_space(num_done: int, bytes_done: int, num_left: int, work: Path) -> None:
    """Raise UnavailableError if the JPEGs that are left, and a copy of all JPEGs, would not fit."""
    needed = int(bytes_done / num_done * (2 * num_left + num_done)) + _MARGIN_BYTES
    free = shutil.disk_usage(work).free
    if free < needed:
        raise UnavailableError(
            f"the finished JPEGs have {bytes_done / num_done:,.0f} bytes each; the {num_left:,} "
            f"that are left and the store need about {_mib(needed)}, {work} has {_mib(free)} free. "
            "Free space and run again, which resumes from here; "
            "or lower precompute.jpeg_quality or precompute.train_size_px."
        )


def _check(needed: int, folder: Path, is_estimate: bool) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UnavailableError(
            f"the packed store needs {'an estimated ' * is_estimate}{_mib(needed)} in {folder}, "
            f"{_mib(free)} are free. Free space, lower precompute.image_size_px or train_size_px, "
            f"or {_OTHER_FORM[is_estimate]}."
        )


def _jpeg_bytes(form: StoreForm, split: str) -> int:
    height, width, channels = form.stored(split).shape
    per_pixel = np.interp(form.jpeg_quality or 100, _JPEG_QUALITIES, _JPEG_BYTES_PER_PIXEL)
    of_channels = 1.0 if channels == 3 else 0.7
    return int(_JPEG_HEADER_BYTES + height * width * float(per_pixel) * of_channels)


def _allocated(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)


def _device(path: Path) -> int:
    return os.stat(path).st_dev


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
