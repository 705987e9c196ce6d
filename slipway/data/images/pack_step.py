"""Packing of images, from the split to the packed store."""

import math

import pyarrow as pa

from slipway.config.params import Params
from slipway.config.sealing import check_inputs
from slipway.data.engine.progress import progress
from slipway.data.engine.rows import SPLITS
from slipway.data.engine.work_folder import work_folder
from slipway.data.sources import sources
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.store import packing
from slipway.data.store.disk_space import check_disk_space, space_needed
from slipway.data.store.jpeg_inputs import JPEG
from slipway.data.store.paths import PackPaths
from slipway.data.store.store_form import StoreForm, store_form
from slipway.system import files


def pack_images(params: Params, rows: pa.Table, paths: PackPaths) -> str:
    """Decode and resize the images into the packed store; return what to print.

    A killed run goes on where it was.
    """
    wanted, task = params.precompute, params.data.task
    data = unpacked(
        params.data, ArchiveLimits(params.clean.max_archive_members, params.clean.max_archive_ratio)
    )
    form = store_form(wanted, params.clean.max_pixels)
    counts = {split: rows["split"].to_pylist().count(split) for split in SPLITS}
    with work_folder(paths.work, packing.packing_key(rows, form, task), "precompute") as work:
        check_disk_space(space_needed(form, counts), work, paths.packed)
        packed = packing.pack(
            lambda wanted_sources: sources.read_samples(data, wanted_sources),
            rows, form, task, work, wanted.num_workers, params.data.engine,
        )  # fmt: skip
        for _ in progress(packed, "precompute", rows.num_rows):
            pass
        check_inputs()  # before DVC could remove what was packed
        files.move_directory(work / "store", paths.packed)
    network = "x".join(map(str, form.network.shape))
    larger = (
        f", training images stored with {form.train_size_px} px"
        if form.train_size_px != form.network.size_px
        else ""
    )
    done = (
        f"packed {rows.num_rows} images of {network} into {paths.packed}, {form.encoding}{larger}"
    )
    if not form.is_jpeg("train"):
        return done
    return f"{_jpeg_size(form, counts['train'], paths)}\n{done}"


def _jpeg_size(form: StoreForm, num_train: int, paths: PackPaths) -> str:
    found = (paths.packed / "train" / JPEG).stat().st_size
    raw = num_train * math.prod(form.stored("train").shape)
    smaller = (
        "" if found < raw else "; precompute.encoding raw is smaller here, lossless and faster"
    )
    return f"training images as JPEG take {found / 2**20:,.1f} MiB, as pixels they would take {raw / 2**20:,.1f} MiB{smaller}"
