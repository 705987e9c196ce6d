"""Packs images: from the rows of the split to the packed store."""

import math
from functools import partial

import pyarrow as pa

from slipway.config.params import Params
from slipway.config.seals import check_inputs
from slipway.data.engine.progress import progress
from slipway.data.engine.rows import SPLITS
from slipway.data.engine.work_folder import work_folder
from slipway.data.sources import sources
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.store import packing
from slipway.data.store.disk_space import check_disk_space, space_needed
from slipway.data.store.jpeg_inputs import JPEG
from slipway.data.store.packed import PackPaths
from slipway.data.store.store_form import StoreForm, store_form
from slipway.system import files


def pack_images(params: Params, rows: pa.Table, paths: PackPaths) -> str:
    """Decode and resize the images into the packed store; return a summary to print.

    The next run resumes a killed one.
    """
    task = params.data.task
    data = unpacked(params.data, ArchiveLimits.of(params.clean))
    form = store_form(params.precompute, params.clean.max_pixels)
    counts = {split: rows["split"].to_pylist().count(split) for split in SPLITS}
    with work_folder(paths.work, packing.packing_key(rows, form, task), "precompute") as work:
        check_disk_space(space_needed(form, counts), work, paths.packed)
        packed = packing.pack(
            partial(sources.read_samples, data),
            rows,
            form,
            task,
            work,
            params.precompute.num_workers,
            params.data.engine,
        )
        for _ in progress(packed, "precompute", rows.num_rows):
            pass
        check_inputs()  # checked before DVC could remove the packed images
        files.move_directory(work / "store", paths.packed)
    shape = "x".join(map(str, form.network.shape))
    done = f"packed {rows.num_rows} images of {shape} into {paths.packed}, {form.encoding}"
    if form.train_size_px != form.network.size_px:
        done += f", training images stored with {form.train_size_px} px"
    if form.is_jpeg("train"):
        return f"{_jpeg_size(form, counts['train'], paths)}\n{done}"
    return done


def _jpeg_size(form: StoreForm, num_train: int, paths: PackPaths) -> str:
    found = (paths.packed / "train" / JPEG).stat().st_size
    raw = num_train * math.prod(form.stored("train").shape)
    text = (
        f"training images as JPEG take {found / 2**20:,.1f} MiB, "
        f"as pixels they would take {raw / 2**20:,.1f} MiB"
    )
    if found < raw:
        return text
    return f"{text}; precompute.encoding raw is smaller here, lossless and faster"
