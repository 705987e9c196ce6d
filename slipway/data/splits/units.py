"""Units: sets of rows that must stay in one split, and the key that draws each unit's split.

Equal rows, and rows that share a group or a near-duplicate cluster, form one unit, also along
chains of groups and clusters. The members of a unit are the names of its groups, and the digests of
its rows without a group. The unit's key is the member with the smallest hash. A new row therefore
changes the key of a unit with k members only with probability 1 / (k + 1), and a row of a known
group never does. If a row joins two units, the joint unit has the key of one of the two.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.data.engine.randomness import id_keys, uniform
from slipway.data.engine.rows import ID_DIGITS

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """The unit of each row, and the key of each unit."""

    of_row: Int  # (N,) index of the unit
    keys: NDArray[np.uint64]  # (U,)

    @property
    def sizes(self) -> Int:
        """The number of rows of each unit, (U,)."""
        return np.bincount(self.of_row, minlength=len(self.keys))

    def select(self, rows: NDArray[np.bool_]) -> "Units":
        """Return the units of the rows in the mask `rows`, with the same keys."""
        kept, of_row = np.unique(self.of_row[rows], return_inverse=True)
        return Units(of_row, self.keys[kept])


def find_units(rows: pa.Table, seed: int) -> Units:
    """Return the units of rows with the schema ROWS; the order of the rows has no influence."""
    contents = pc.utf8_slice_codeunits(rows["id"], 0, ID_DIGITS)  # the same for equal rows
    (ids, id_names), (groups, group_names), (clusters, cluster_names) = (
        codes(column) for column in (contents, rows["group"], rows["cluster"])
    )
    first_group, first_cluster = len(id_names), len(id_names) + len(group_names)
    grouped, clustered = groups >= 0, clusters >= 0
    component = connected_components(
        first_cluster + len(cluster_names),
        np.concatenate([ids[grouped], ids[clustered]]),
        np.concatenate([groups[grouped] + first_group, clusters[clustered] + first_cluster]),
    )
    keys = np.concatenate([id_keys(id_names.to_pylist()), _group_keys(group_names)])
    has_group = np.zeros(len(component), np.bool_)
    has_group[component[first_group:first_cluster]] = True
    is_member = ~has_group[component[:first_cluster]]
    is_member[first_group:] = True
    members = np.flatnonzero(is_member)
    roots, representatives = _choose(component[members], keys[members], seed)
    return Units(np.searchsorted(roots, component[ids]), representatives)


def codes(column: pa.ChunkedArray) -> tuple[Int, pa.Array]:
    """Return the index of each row's value, (N,) with -1 for null, and the distinct values."""
    encoded = pc.dictionary_encode(column.combine_chunks())
    indices = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    return indices.astype(np.int64), encoded.dictionary


def connected_components(num_nodes: int, left: Int, right: Int) -> Int:
    """Return the smallest node in the connected component of each node, (num_nodes,).

    The edges connect the nodes `left` and `right`, (E,) each. Each round attaches every component
    to its smallest neighbour, then shortens all paths to one step.
    """
    root = np.arange(num_nodes)
    while True:
        one, other = root[left], root[right]
        if np.array_equal(one, other):
            return root
        np.minimum.at(root, np.maximum(one, other), np.minimum(one, other))
        while not np.array_equal(shorter := root[root], root):
            root = shorter


def _group_keys(names: pa.Array) -> NDArray[np.uint64]:
    groups = [f"group/{name}".encode() for name in names.to_pylist()]
    return id_keys([hashlib.sha256(group).hexdigest() for group in groups])


def _choose(component: Int, keys: NDArray[np.uint64], seed: int) -> tuple[Int, NDArray[np.uint64]]:
    """Return the ascending components, and the key that a random number selects for each."""
    order = np.lexsort((keys, uniform(seed, 0, keys, "unit"), component))
    roots, first = np.unique(component[order], return_index=True)
    return roots, keys[order][first]
