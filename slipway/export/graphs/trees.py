"""Writes boosted trees as ONNX's operator `TreeEnsemble`, in place of the placeholder node.

LightGBM's thresholds are float64, but ONNX compares in float32. Each threshold is therefore rounded
down, so that `x <= threshold` holds for exactly the same float32 numbers. Rounding to the nearest
float32 could move a number to the other side.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from torch import nn

from slipway.system import files
from slipway.system.errors import BundleError
from slipway.training.networks.trees import TREES_NODE, TreeNetwork

DOMAIN, VERSION = "ai.onnx.ml", 5
NODE = "TreeEnsemble"
_LESS_EQUAL, _MEMBER = 0, 6  # values of nodes_modes
_SUM, _NO_TRANSFORM = 1, 0
# decision_type of LightGBM's text
_CATEGORICAL, _DEFAULT_LEFT = 1, 2
_MISSING_NONE, _MISSING_ZERO = 0, 1  # bits 2 and 3; 2: NaN
_WORD = 32  # bits of a word


@dataclass(frozen=True)
class Tree:
    """A tree as in LightGBM's text format; a negative child is the leaf with the index `~child`."""

    columns: NDArray[np.int64]  # (splits,) like the next four
    decisions: NDArray[np.int64]
    thresholds: NDArray[np.float64]  # for a categorical split, its number among these
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    leaves: NDArray[np.float64]  # (splits + 1,)
    members: list[list[int]]  # codes that go left, of each categorical split


def read_trees(text: str) -> list[Tree]:
    """Parse all trees in LightGBM's text format."""
    blocks = text.partition("\nend of trees")[0].split("\nTree=")[1:]
    return [_read_tree(dict(_fields(block))) for block in blocks]


def round_down(thresholds: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return for each threshold the largest float32 number that is not above it."""
    nearest = thresholds.astype(np.float32)
    below = np.nextafter(nearest, np.float32(-np.inf))
    return np.where(nearest.astype(np.float64) > thresholds, below, nearest)


def write_trees(model: onnx.ModelProto, network: nn.Module) -> None:
    """Replace the placeholder nodes of trees in the graph `model` of `network`, in place."""
    texts = {
        files.sha256_bytes(module.text.encode()): (module.text, module.num_sums)
        for module in network.modules()
        if isinstance(module, TreeNetwork)
    }
    domain, name = TREES_NODE.split("::")
    for place, node in enumerate(model.graph.node):
        if (node.domain, node.op_type) == (domain, name):
            digest = node.attribute[0].s.decode()
            made = tree_node(*texts[digest], node.input[0], node.output[0])
            made.name = node.name
            model.graph.node[place].CopyFrom(made)
    used = [entry for entry in model.opset_import if entry.domain == domain]
    for entry in used:
        model.opset_import.remove(entry)
    if used:
        model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))


def has_trees(graph: bytes) -> bool:
    """Return True if the graph computes trees."""
    nodes = onnx.load_model_from_string(graph).graph.node
    return any(node.domain == DOMAIN and node.op_type == NODE for node in nodes)


def tree_node(text: str, num_sums: int, source: str, target: str) -> onnx.NodeProto:
    """Return the node that maps `source` (rows, columns) float32 to `target` (rows, num_sums)."""
    ensemble = _Ensemble()
    for place, tree in enumerate(read_trees(text)):
        ensemble.add(tree, place % num_sums)
    return helper.make_node(
        NODE, [source], [target], domain=DOMAIN, n_targets=num_sums, **ensemble.attributes()
    )


class _Ensemble:
    """Collects the attributes of `TreeEnsemble`, one tree after the other."""

    def __init__(self) -> None:
        self._roots: list[int] = []
        self._columns: list[int] = []
        self._modes: list[int] = []
        self._splits: list[float] = []
        self._children: dict[bool, list[int]] = {True: [], False: []}
        self._are_leaves: dict[bool, list[int]] = {True: [], False: []}
        self._missing_is_true: list[int] = []
        self._members: list[float] = []
        self._leaf_targets: list[int] = []
        self._leaves: list[float] = []

    def add(self, tree: Tree, target: int) -> None:
        """Append a tree, whose leaf values are added to output number `target`."""
        if not len(tree.columns):
            tree = _with_a_split(tree)
        first, first_leaf = len(self._columns), len(self._leaves)
        self._roots.append(first)
        self._columns += tree.columns.tolist()
        is_member = (tree.decisions & _CATEGORICAL).astype(bool)
        self._modes += np.where(is_member, _MEMBER, _LESS_EQUAL).tolist()
        self._splits += np.where(is_member, 0, round_down(tree.thresholds)).tolist()
        for side, children in ((True, tree.left), (False, tree.right)):
            is_leaf = children < 0
            self._are_leaves[side] += is_leaf.astype(int).tolist()
            places = np.where(is_leaf, first_leaf + ~children, first + children)
            self._children[side] += places.tolist()
        self._missing_is_true += _goes_left_if_missing(tree).astype(int).tolist()
        for number in tree.thresholds[is_member].astype(int).tolist():
            self._members += [*map(float, tree.members[number]), np.nan]
        self._leaf_targets += [target] * len(tree.leaves)
        self._leaves += tree.leaves.tolist()

    def attributes(self) -> dict[str, Any]:
        """Return the attributes by name."""
        uint8, float32 = onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT
        found: dict[str, Any] = {
            "aggregate_function": _SUM,
            "post_transform": _NO_TRANSFORM,
            "tree_roots": self._roots,
            "nodes_featureids": self._columns,
            "nodes_modes": helper.make_tensor("modes", uint8, [len(self._modes)], self._modes),
            "nodes_splits": helper.make_tensor(
                "splits", float32, [len(self._splits)], self._splits
            ),
            "nodes_truenodeids": self._children[True],
            "nodes_trueleafs": self._are_leaves[True],
            "nodes_falsenodeids": self._children[False],
            "nodes_falseleafs": self._are_leaves[False],
            "nodes_missing_value_tracks_true": self._missing_is_true,
            "leaf_targetids": self._leaf_targets,
            "leaf_weights": helper.make_tensor(
                "leaves", float32, [len(self._leaves)], self._leaves
            ),
        }
        if self._members:
            found["membership_values"] = helper.make_tensor(
                "members", float32, [len(self._members)], self._members
            )
        return found


def _goes_left_if_missing(tree: Tree) -> NDArray[np.bool_]:
    """Return a mask (splits,) of the splits that send NaN to the left.

    A split without a direction for NaN treats it as 0.
    """
    missing = (tree.decisions >> 2) & 3
    if (missing == _MISSING_ZERO).any():
        raise BundleError(
            "these trees treat 0 as missing, which Slipway never sets; expected trees that "
            "`train` wrote. Run `dvc repro train`."
        )
    is_categorical = (tree.decisions & _CATEGORICAL).astype(bool)
    by_default = (tree.decisions & _DEFAULT_LEFT).astype(bool)
    found = np.where(missing == _MISSING_NONE, tree.thresholds >= 0, by_default)
    return np.where(is_categorical, False, found)


def _with_a_split(tree: Tree) -> Tree:
    """Replace the only leaf of a tree by a split, whose two sides both lead to this leaf."""
    zero = np.zeros(1, np.int64)
    return Tree(zero, zero, np.zeros(1), ~zero, ~zero, tree.leaves, [])


def _fields(block: str) -> Iterator[tuple[str, list[str]]]:
    for line in block.splitlines():
        name, _, values = line.partition("=")
        yield name, values.split()


def _read_tree(fields: dict[str, list[str]]) -> Tree:
    words = [int(word) for word in fields.get("cat_threshold", [])]
    bounds = [int(bound) for bound in fields.get("cat_boundaries", [])]
    return Tree(
        columns=np.array(fields.get("split_feature", []), np.int64),
        decisions=np.array(fields.get("decision_type", []), np.int64),
        thresholds=np.array(fields.get("threshold", []), np.float64),
        left=np.array(fields.get("left_child", []), np.int64),
        right=np.array(fields.get("right_child", []), np.int64),
        leaves=np.array(fields["leaf_value"], np.float64),
        members=[_codes(words[begin:end]) for begin, end in pairwise(bounds)],
    )


def _codes(words: list[int]) -> list[int]:
    """Return the codes of a bitmap: the positions of its set bits."""
    return [
        _WORD * place + bit
        for place, word in enumerate(words)
        for bit in range(_WORD)
        if word >> bit & 1
    ]
