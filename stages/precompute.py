"""Decodes and resizes every image once, or encodes every row of a table, into arrays that training maps into memory.

A killed run goes on where it was.
"""

import math
from pathlib import Path

from slipway.config.command import run_stage
from slipway.config.params import Params
from slipway.config.sealing import check_inputs
from slipway.data.engine.progress import progress
from slipway.data.engine.rows import SPLIT_ROWS, SPLITS, read_table
from slipway.data.engine.work_folder import work_folder
from slipway.data.sources import sources
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.store import packing
from slipway.data.store.disk_space import check_disk_space, space_needed
from slipway.data.store.jpeg_inputs import JPEG
from slipway.data.store.store_form import store_form
from slipway.data.tables.files import read_cells
from slipway.data.tables.packing import pack_table, rare_categories
from slipway.kinds.registry import is_table
from slipway.system import files

CLEAN = Path("data/clean")
SPLIT = Path("data/split")
PACKED = Path("data/packed")
WORK = Path(".work/precompute")


def run(params: Params) -> None:
    """Pack the split rows; IntegrityError when a raw image is not what it was when it was cleaned."""
    (_run_table if is_table(params.data.task) else _run_images)(params)


def _run_table(params: Params) -> None:
    rows = read_table(SPLIT / "rows.parquet", SPLIT_ROWS)
    cells, columns = read_cells(CLEAN)
    in_vain = {
        "encoding jpeg": params.precompute.encoding == "jpeg",
        "train_size_px": params.precompute.train_size_px is not None,
    }
    if any(in_vain.values()):
        print(
            f"tables have no pixels: without effect here are {', '.join(key for key, asked in in_vain.items() if asked)}"
        )
    with files.new_directory(PACKED) as folder:
        contract = pack_table(rows, cells, columns, params.precompute, params.data.task, folder)
    notes = rare_categories(cells, contract, params.precompute.max_categories)
    packed = f"packed {rows.num_rows} rows of {len(contract.columns)} columns, {contract.shape[0]} numbers each, into {PACKED}"
    print("\n".join([packed, *notes]))


def _run_images(params: Params) -> None:
    rows = read_table(SPLIT / "rows.parquet", SPLIT_ROWS)
    wanted, task = params.precompute, params.data.task
    data = unpacked(
        params.data, ArchiveLimits(params.clean.max_archive_members, params.clean.max_archive_ratio)
    )
    form = store_form(wanted, params.clean.max_pixels)
    counts = {split: rows["split"].to_pylist().count(split) for split in SPLITS}
    with work_folder(WORK, packing.packing_key(rows, form, task), "precompute") as work:
        check_disk_space(space_needed(form, counts), work, PACKED)
        packed = packing.pack(
            lambda wanted_sources: sources.read_samples(data, wanted_sources),
            rows, form, task, work, wanted.num_workers, params.data.engine,
        )  # fmt: skip
        for _ in progress(packed, "precompute", rows.num_rows):
            pass
        check_inputs()  # before DVC could remove what was packed
        files.move_directory(work / "store", PACKED)
    if form.is_jpeg("train"):
        found, raw = (
            (PACKED / "train" / JPEG).stat().st_size,
            counts["train"] * math.prod(form.stored("train").shape),
        )
        smaller = (
            "" if found < raw else "; precompute.encoding raw is smaller here, lossless and faster"
        )
        print(
            f"training images as JPEG take {found / 2**20:,.1f} MiB, as pixels they would take {raw / 2**20:,.1f} MiB{smaller}"
        )
    network = "x".join(map(str, form.network.shape))
    larger = (
        f", training images stored with {form.train_size_px} px"
        if form.train_size_px != form.network.size_px
        else ""
    )
    print(f"packed {rows.num_rows} images of {network} into {PACKED}, {form.encoding}{larger}")


if __name__ == "__main__":
    run_stage(run)
