"""Fits trees to the rows of a small packed table."""

from pathlib import Path
from typing import Any, NamedTuple

from slipway.config.training import TrainParams
from slipway.data.augmentation.plan import plan_from_params, write_plan
from slipway.kinds.registry import Task
from slipway.training.job import TrainingData, network_spec, open_data
from slipway.training.networks.networks import build_network
from slipway.training.networks.trees import TreeNetwork
from slipway.training.trees.booster import FittedTrees, fit_trees
from tests.packed_tables import write_packed_table
from tests.project_params import PROJECT, augment_params

ARGUMENTS = {
    "num_leaves": 15,
    "max_depth": None,
    "min_data_in_leaf": 5,
    "feature_fraction": 0.8,
    "bagging_fraction": 0.8,
    "lambda_l2": 1.0,
    "max_bin": 255,
}
ROWS = {"train": 400, "val": 101, "test": 99}


class Fitted(NamedTuple):
    """A network with its trees, and the rows to which the trees were fitted."""

    network: TreeNetwork
    trees: FittedTrees
    data: TrainingData


def tree_params(**changes: Any) -> TrainParams:
    """Return settings of the section train for trees."""
    values = {
        "network": "lightgbm",
        "network_arguments": ARGUMENTS,
        "epochs": 30,
        "learning_rate": 0.1,
        "label_smoothing": 0.0,
    }
    return TrainParams.model_validate(PROJECT.train.model_dump() | values | changes)


def packed(root: Path, task: Task = "table_regression", weight: float = 1.0) -> TrainingData:
    """Write and open a packed table."""
    write_packed_table(root / "packed", task, ROWS, weight)
    write_plan(root / "augmented", plan_from_params(augment_params(), 7))
    return open_data(root / "packed", root / "augmented")


def fitted(data: TrainingData, seed: int = 7, threads: int = 2, **changes: Any) -> Fitted:
    """Return a network with trees that were fitted to the training rows of `data`."""
    params = tree_params(**changes)
    network = build_network(network_spec(params, data.manifest))
    assert isinstance(network, TreeNetwork)
    return Fitted(network.eval(), fit_trees(network, seed, params, data, threads), data)
