"""Computes the targets of split rows in the packed store, for any kind of input."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.label_sets import label_counts, membership
from slipway.data.engine.rows import PACKED_ROWS, SPLITS
from slipway.data.store.packed import (
    PackedManifest,
    TargetScale,
    write_labels,
    write_manifest,
    write_split,
)
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import Task, kind_of
from slipway.system.errors import DataError


def class_names(rows: pa.Table, task: Task) -> list[str]:
    """Return the classes in `rows` in the order of their indices; none for a numeric target."""
    target = kind_of(task).target
    if target.several:
        return list(label_counts(rows["label"]))
    return sorted(pc.unique(rows["label"]).to_pylist()) if target.has_classes else []


def targets_of(rows: pa.Table, classes: list[str], task: Task) -> NDArray[Any]:
    """Return the targets, (N,) float64: class indices, or the values of a numeric target.

    For rows with several labels, returns (N, K) uint8: 1 for each label of the row.
    """
    if kind_of(task).target.several:
        return membership(rows["label"], classes)
    targets = rows["target"]
    if classes:
        targets = pc.index_in(rows["label"], pa.array(classes, pa.string()))
    return np.asarray(targets.to_numpy(), np.float64)


def target_scale(targets: NDArray[np.float64]) -> TargetScale:
    """Return the mean and standard deviation of training targets, (N,).

    Raises DataError if all targets are equal, or if one is too large.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        std = float(targets.std())
    if std == 0:
        raise DataError(
            f"all {len(targets)} targets of the training split are {targets[0]:g}, "
            "expected different numbers. Add data."
        )
    if not np.isfinite(std):
        raise DataError(
            f"the {len(targets)} targets of the training split have the standard deviation "
            f"{std:g}: they are too large. Use a larger unit."
        )
    return TargetScale(mean=float(targets.mean()), std=std)


def write_store(
    root: Path,
    rows: pa.Table,
    task: Task,
    contract: InputContract,
    write_inputs: Callable[[Path, pa.ChunkedArray], None],
) -> None:
    """Write rows whose encoded inputs need no means: a folder of each split, and the manifest.

    Args:
        root: an existing, empty folder.
        rows: in the schema SPLIT_ROWS.
        write_inputs: writes the inputs of the chosen rows to a path.
    """
    classes = class_names(rows, task)
    targets = targets_of(rows, classes, task)
    manifests = {}
    for split in SPLITS:
        chosen = pc.equal(rows["split"], split)
        own_targets = targets[chosen.to_numpy()]
        (root / split).mkdir()
        write_labels(root / split, own_targets)
        write_inputs(root / split / "inputs.npy", chosen)
        own_rows = packed_rows(rows.filter(chosen), own_targets)
        manifests[split] = write_split(root / split, own_rows, contract.shape)
    is_training = pc.equal(rows["split"], "train").to_numpy()
    manifest = PackedManifest(
        format_version=3,
        task=task,
        input=contract,
        classes=classes,
        mean=[],
        std=[],
        target_scale=None if classes else target_scale(targets[is_training]),
        splits=manifests,
    )
    write_manifest(root, manifest)


def packed_rows(rows: pa.Table, targets: NDArray[Any]) -> pa.Table:
    """Convert rows of SPLIT_ROWS to PACKED_ROWS; a missing weight becomes 1.

    If a row may have several labels, its target in the table is the number of its labels.
    """
    if targets.ndim == 2:
        targets = targets.sum(axis=1, dtype=np.float64)
    columns = {
        "id": rows["id"],
        "source": rows["source"],
        "target": targets,
        "weight": pc.fill_null(rows["weight"], 1.0),
        "leaked": rows["leaked"],
    }
    return pa.table(columns, schema=PACKED_ROWS)
