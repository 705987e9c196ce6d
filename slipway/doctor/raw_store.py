"""A copy of a packed store with pixels instead of JPEGs: `precompute.encoding: raw`, to be measured without a repro."""

import shutil
from dataclasses import replace

import numpy as np

from slipway.data.store.jpeg_inputs import JPEG, OFFSETS
from slipway.data.store.packed import open_split, read_manifest
from slipway.doctor.timed_processes import Project
from slipway.system.errors import UnavailableError

_ROWS = 256  # decoded at a time


def raw_store(project: Project) -> Project:
    """The project with such a store in its scratch folder; UnavailableError where the disk is too small."""
    folder = project.scratch / "raw store"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(project.packed, folder, ignore=shutil.ignore_patterns(JPEG, OFFSETS, "test"))
    inputs = open_split(project.packed, read_manifest(project.packed), "train").inputs
    needed, free = int(np.prod(inputs.shape)), shutil.disk_usage(folder).free
    if needed > free:
        raise UnavailableError(
            f"pixels would take {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free. Free space, or keep JPEGs."
        )
    pixels = np.lib.format.open_memmap(
        folder / "train" / "inputs.npy", mode="w+", dtype=np.uint8, shape=inputs.shape
    )
    for begin in range(0, len(inputs), _ROWS):
        pixels[begin : begin + _ROWS] = inputs[begin : begin + _ROWS]
    pixels.flush()
    return replace(project, packed=folder)
