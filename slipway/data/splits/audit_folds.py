"""Which fold of an audit each row is in: what belongs together (groups, near duplicates) is in one fold, and every class in two at least.

A pure function of the content and the seed. The folds are those of the audit alone: `split.folds` decides which rows are for validation.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.splits.assignment import assign_exact
from slipway.data.splits.units import codes, find_units
from slipway.system.errors import DataError

AUDITED = (
    "train",
    "val",
)  # never test: labels mended by what a network says of them would flatter every network
_MAX_SHOWN = 5


def audited_rows(rows: pa.Table) -> pa.Table:
    """Return the audited rows of SPLIT_ROWS, split by split, by id as in the packed store."""
    return pa.concat_tables(
        [rows.filter(pc.equal(rows["split"], split)).sort_by("id") for split in AUDITED]
    )


def audit_folds(rows: pa.Table, num_folds: int, seed: int) -> NDArray[np.int64]:
    """(N,) the fold of each of `rows.SPLIT_ROWS`, from 0; equal shares of each class.

    DataError for classes of which all rows are in one fold: a network that never saw a class finds it wrong wherever it stands.
    """
    folds = assign_exact(rows, find_units(rows, seed), [1 / num_folds] * num_folds, seed, "audit")
    _check_classes(rows, folds)
    return folds


def _check_classes(rows: pa.Table, folds: NDArray[np.int64]) -> None:
    labels, names = codes(rows["label"])
    pairs = np.unique(np.stack([labels, folds]), axis=1)
    num_folds_of = np.bincount(pairs[0], minlength=len(names))
    if (num_folds_of >= 2).all():
        return
    alone = sorted(names.take(pa.array(np.flatnonzero(num_folds_of < 2))).to_pylist())
    shown = ", ".join(map(repr, alone[:_MAX_SHOWN])) + (
        f" and {len(alone) - _MAX_SHOWN} more" if len(alone) > _MAX_SHOWN else ""
    )
    raise DataError(
        f"an audit needs rows of each class in at least two folds, but all rows of {shown} are in one: they are too few, or one group or "
        "chain of near duplicates. Add rows of it, merge the class into another with data.label_map, or set audit.folds to null."
    )
