"""Builds `reports/data.html`: the packed rows as the network gets them, before any training."""

from collections.abc import Mapping

from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.kinds.registry import kind_of
from slipway.reports.pages.html_page import page


def data_page(splits: Mapping[str, PackedSplit], manifest: PackedManifest) -> str:
    """Return the HTML page of the splits; train must be among them.

    Only a bounded number of rows is read: those with the smallest ids, which are a reproducible
    random choice. For a kind of input without the part `data_sections`, the page shows only the
    numbers of rows.
    """
    counts = ", ".join(f"{len(split):,} {name}" for name, split in splits.items())
    kind = kind_of(manifest.task).input
    has_sections = "data_sections" in kind.parts
    sections = kind.load_part("data_sections")(splits, manifest) if has_sections else []
    return page("Data", f"Packed rows: {counts}", sections)
