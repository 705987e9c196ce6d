"""Every one of two real ranks validates with BatchNorm statistics averaged over both."""

import json
import sys
from pathlib import Path
from subprocess import STDOUT
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from slipway.training.module import TrainingModule
from slipway.training.networks.networks import build_network
from slipway.training.recipe.weight_average import WeightAverage, average_running_statistics
from tests import warm_starts
from tests.project_params import PROJECT
from tests.training.conftest import ROOT, spec
from tests.training.real_runs import environment

pytestmark = pytest.mark.process
VALUES = (1.0, 2.5)  # of the running means and variances, by rank


def nothing(network: Any) -> None:
    """Negative control: do nothing, so that each rank keeps its own statistics."""


def directly(network: Any) -> None:
    average_running_statistics(network)


def in_validation(network: Any) -> None:
    module = TrainingModule(
        network, PROJECT.train, seed=3, steps_per_epoch=1, ids=[], mean_weight=1.0
    )
    module.train_sums.add(loss=torch.ones(1), counted=torch.ones(1, dtype=torch.bool))
    module.on_validation_epoch_start()


def for_the_average(network: Any) -> None:
    average: Any = WeightAverage(network, 0.9)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(strategy=strategy, global_step=0)
    average.on_train_start(trainer, None)
    average.on_validation_start(trainer, None)
    average.on_validation_end(trainer, None)


@pytest.mark.parametrize(
    ("average", "expected"),
    [
        (directly, [1.75, 1.75]),
        (in_validation, [1.75, 1.75]),
        (for_the_average, [1.75, 1.75]),
        (nothing, [1.0, 2.5]),
    ],
)
def test_every_rank_validates_with_the_mean_statistics_of_all_ranks(
    average: Any, expected: list[float], tmp_path: Path
) -> None:
    module = "tests.training.recipe.test_running_statistics"
    variables = {**environment(), "OMP_NUM_THREADS": "1"}
    commands = [[module, average.__name__, str(tmp_path), rank] for rank in ("0", "1")]
    ranks = [warm_starts.start(command, ROOT, variables, STDOUT) for command in commands]
    for rank in ranks:
        with rank:
            assert rank.wait(120) == 0, rank.stdout and rank.stdout.read()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [set(values) for values in found] == [{value} for value in expected]


def main(average: str, folder: str, rank: int) -> None:
    """Run one rank: set the statistics to its value, average them, and write the result."""
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    network = build_network(spec())
    statistics = [
        value
        for name, value in network.named_buffers()
        if name.endswith(("running_mean", "running_var"))
    ]
    for value in statistics:
        value.fill_(VALUES[rank])
    globals()[average](network)
    Path(folder, f"{rank}.json").write_text(
        json.dumps([float(number) for value in statistics for number in value])
    )
    distributed.destroy_process_group()


if __name__ == "__main__":
    _, name, directory, number = sys.argv
    main(name, directory, int(number))
