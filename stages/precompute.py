"""Decodes and resizes every image once, or encodes every row of a table, into arrays that training maps into memory."""

from pathlib import Path

from slipway import files
from slipway.command import run_stage
from slipway.contract import is_table
from slipway.data import packing, sources
from slipway.data.archives import ArchiveLimits, unpacked
from slipway.data.progress import progress
from slipway.data.rows import SPLIT_ROWS, read_table
from slipway.data.table_files import read_cells
from slipway.data.table_packing import pack_table
from slipway.params import Params
from slipway.preprocess import ImageContract

CLEAN = Path("data/clean")
SPLIT = Path("data/split")
PACKED = Path("data/packed")


def run(params: Params) -> None:
    """Pack the split rows; IntegrityError when a raw image is not what it was when it was cleaned."""
    (_run_table if is_table(params.data.task) else _run_images)(params)


def _run_table(params: Params) -> None:
    rows = read_table(SPLIT / "rows.parquet", SPLIT_ROWS)
    cells, types = read_cells(CLEAN)
    with files.new_directory(PACKED) as folder:
        contract = pack_table(rows, cells, types, params.precompute, params.data.task, folder)
    print(f"packed {rows.num_rows} rows of {len(contract.columns)} columns, {contract.shape[0]} numbers each, into {PACKED}")


def _run_images(params: Params) -> None:
    rows = read_table(SPLIT / "rows.parquet", SPLIT_ROWS)
    wanted = params.precompute
    contract = ImageContract(
        kind="images",
        size_px=wanted.image_size_px,
        channels=wanted.channels,
        fit=wanted.fit,
        interpolation=wanted.interpolation,
        max_pixels=params.clean.max_pixels,
        transform=None,
    )
    data = unpacked(params.data, ArchiveLimits(params.clean.max_archive_members, params.clean.max_archive_ratio))
    samples = sources.read_samples(data, rows["source"].to_pylist())
    with files.new_directory(PACKED) as folder:
        packed = packing.pack(samples, rows, contract, params.data.task, folder, wanted.num_workers)
        for _ in progress(packed, "precompute", rows.num_rows):
            pass
    print(f"packed {rows.num_rows} images of {contract.size_px}x{contract.size_px}x{contract.channels} into {PACKED}")


if __name__ == "__main__":
    run_stage(run)
