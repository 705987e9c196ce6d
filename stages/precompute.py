"""Decodes and resizes every image once, into arrays that training maps into memory."""

from pathlib import Path

from slipway import files
from slipway.command import run_stage
from slipway.data import packing, sources
from slipway.data.archives import ArchiveLimits, unpacked
from slipway.data.progress import progress
from slipway.data.rows import SPLIT_ROWS, read_table
from slipway.params import Params
from slipway.preprocess import ImageContract

SPLIT = Path("data/split")
PACKED = Path("data/packed")


def run(params: Params) -> None:
    """Pack the split rows; IntegrityError when a raw image is not what it was when it was cleaned."""
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
