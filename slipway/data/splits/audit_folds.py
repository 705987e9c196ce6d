"""Assigns rows to the folds of the audit, such that related rows stay together.

Rows of one group or near-duplicate cluster are in the same fold. The rows of a class are spread
over the folds, at least over two. The folds are a pure function of the content and the seed. They
are independent of `split.folds`, which decides which rows are for validation.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.sources.shards import listed
from slipway.data.splits.assignment import assign_exact
from slipway.data.splits.units import codes, find_units
from slipway.system.errors import DataError

# Never test, because labels corrected with the help of a network favour all networks.
AUDITED = ("train", "val")


def audited_rows(rows: pa.Table) -> pa.Table:
    """Return the audited rows of SPLIT_ROWS, ordered by split and id as in the packed store."""
    return pa.concat_tables(
        [rows.filter(pc.equal(rows["split"], split)).sort_by("id") for split in AUDITED]
    )


def audit_folds(rows: pa.Table, num_folds: int, seed: int) -> NDArray[np.int64]:
    """Return the fold of each row of SPLIT_ROWS, (N,) from 0; each class is spread evenly.

    Raises DataError, which names the classes whose rows are all in one fold. A network trained
    without a class would report every label of that class as wrong.
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
    found = sorted(names.filter(pa.array(num_folds_of < 2)).to_pylist())
    shown = listed([repr(name) for name in found])
    raise DataError(
        f"an audit needs rows of each class in at least two folds, but all rows of {shown} are in "
        "one: they are too few, or one group or chain of near duplicates. Add rows of it, merge "
        "the class into another with data.label_map, or set audit.folds to null."
    )
