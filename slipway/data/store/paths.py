"""Folders that packing reads and writes."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PackPaths:
    """The folders of the stage `precompute`."""

    clean: Path  # what `clean` wrote
    packed: Path  # becomes the packed store, as a whole
    work: Path  # for what an interrupted run left
