"""The room that a packed store needs on the disk, computed before it is written.

Pixels are counted exactly. The size of JPEGs depends on the pictures: it is estimated before, and then from those done.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from slipway.data.store.store_form import StoreForm
from slipway.system.errors import UnavailableError

_MARGIN_BYTES = 64 << 20  # for the tables and the file system itself
_ROW_BYTES = 1 << 10  # of a row in the tables and markers, generously
_JPEG_HEADER_BYTES = 700
# Bytes per pixel by quality, above what photographs at 224 px need (bench/results/precompute.md); noise needs more.
_JPEG_QUALITIES = (1, 50, 75, 90, 95, 100)
_JPEG_BYTES_PER_PIXEL = (0.1, 0.25, 0.4, 0.6, 0.8, 2.0)
_OTHER_FORM = {False: "set precompute.encoding to jpeg", True: "lower precompute.jpeg_quality"}


class Need(NamedTuple):
    """Bytes of a store, and further bytes needed while it is made."""

    store: int
    besides: int
    is_estimate: bool


def space_needed(form: StoreForm, num_rows: Mapping[str, int]) -> Need:
    """Compute the space for `num_rows` of each split."""
    pixels = sum(
        rows * int(np.prod(form.stored(split).shape))
        for split, rows in num_rows.items()
        if not form.is_jpeg(split)
    )
    jpegs = sum(
        rows * _jpeg_bytes(form, split) for split, rows in num_rows.items() if form.is_jpeg(split)
    )
    tables = sum(num_rows.values()) * _ROW_BYTES
    return Need(pixels + jpegs + tables + _MARGIN_BYTES, jpegs + tables, is_estimate=jpegs > 0)


def check_disk_space(need: Need, work: Path, target: Path) -> None:
    """UnavailableError if there is less room than the store needs, in `work` where it is made or beside `target` where it goes.

    What `work` already holds counts as room.
    """
    place = _existing(target.parent)
    _check(need.store + need.besides - _allocated(work), work, need.is_estimate)
    if _device(work) != _device(place):  # otherwise it is moved, and needs no room twice
        _check(need.store, place, need.is_estimate)


def check_jpeg_space(num_done: int, bytes_done: int, num_left: int, work: Path) -> None:
    """UnavailableError if the remaining JPEGs and the store's copy of all would not fit."""
    needed = int(bytes_done / num_done * (2 * num_left + num_done)) + _MARGIN_BYTES
    free = shutil.disk_usage(work).free
    if free < needed:
        raise UnavailableError(
            f"the JPEGs done have {bytes_done / num_done:,.0f} bytes each; the {num_left:,} that are left and the store need about "
            f"{_mib(needed)}, {work} has {_mib(free)} free. Free space and run again, it goes on here; "
            "or lower precompute.jpeg_quality or precompute.train_size_px."
        )


def _check(needed: int, place: Path, is_estimate: bool) -> None:
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UnavailableError(
            f"the packed store needs {'an estimated ' * is_estimate}{_mib(needed)} in {place}, {_mib(free)} are free. Free space, lower "
            f"precompute.image_size_px or train_size_px, or {_OTHER_FORM[is_estimate]}."
        )


def _jpeg_bytes(form: StoreForm, split: str) -> int:
    height, width, channels = form.stored(split).shape
    per_pixel = float(
        np.interp(form.jpeg_quality or 100, _JPEG_QUALITIES, _JPEG_BYTES_PER_PIXEL)
    ) * (1.0 if channels == 3 else 0.7)
    return int(_JPEG_HEADER_BYTES + height * width * per_pixel)


def _allocated(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)


def _device(path: Path) -> int:
    return os.stat(path).st_dev


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
