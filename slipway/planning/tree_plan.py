"""Predicts the time and memory of training boosted trees, from a few real rounds."""

import statistics
import time
from itertools import pairwise

from slipway.config.params import Params
from slipway.reports.console import size
from slipway.system.cores import num_cores
from slipway.training.job import Paths, network_spec, open_data
from slipway.training.networks.networks import build_network
from slipway.training.networks.trees import TreeNetwork
from slipway.training.trees.booster import History, fit_trees

_TIMED_ROUNDS = 11  # the first one also bins the columns, so it counts once
# For each cell: the packed value, its float32 copy with NaN, and LightGBM's bin.
_CELL_BYTES = 4 + 4 + 2


def plan_trees(params: Params, paths: Paths) -> str:
    """Run a few rounds on the packed data, and describe the network, the memory and the time.

    Raises SchemaError if the data are not packed yet.
    """
    train = params.train
    data = open_data(paths.packed, paths.augmented)
    network = build_network(network_spec(train, data.manifest))
    assert isinstance(network, TreeNetwork)
    times: list[float] = [time.perf_counter()]

    def note(_: History) -> None:
        times.append(time.perf_counter())

    rounds = train.model_copy(
        update={"epochs": min(train.epochs, _TIMED_ROUNDS), "early_stopping_patience": None}
    )
    fit_trees(network, params.seed, rounds, data, num_cores(), note)
    seconds = [after - before for before, after in pairwise(times)]
    usual = statistics.median(seconds[1:] or seconds)
    total = seconds[0] + usual * (train.epochs - 1)
    leaves = network.arguments.num_leaves
    cells = (data.num_train + len(data.val)) * data.manifest.input.shape[0]
    stop = " or less, if it stops early" if train.early_stopping_patience else ""
    return "\n".join(
        [
            f"network   {train.network}, up to {train.epochs} rounds of trees with up to {leaves} "
            "leaves",
            f"rows      {data.num_train:,} for training, {len(data.val):,} for validation",
            f"memory    {size(cells * _CELL_BYTES)} of rows and bins beside the process",
            f"time      {usual * 1000:,.1f} ms a round, {total:,.0f} s in total{stop}",
            "note      one process on the CPU; a killed training starts from the first round",
        ]
    )
