"""Trains the network on the packed store and writes `artifacts/checkpoint/` and `metrics/train.json`."""

from slipway.command import run_stage
from slipway.params import Params
from slipway.training.run import PROJECT_PATHS, train


def run(params: Params) -> None:
    """Train as `params.train` asks."""
    train(params.seed, params.train, PROJECT_PATHS)


if __name__ == "__main__":
    run_stage(run)
