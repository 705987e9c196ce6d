"""Trains the network on the packed store and writes `artifacts/checkpoint/` and `metrics/train.json`."""

from pathlib import Path

from slipway.command import run_stage
from slipway.params import Params
from slipway.training.run import Paths, train

PATHS = Paths(
    packed=Path("data/packed"),
    augmented=Path("data/augmented"),
    checkpoint=Path("artifacts/checkpoint"),
    metrics=Path("metrics/train.json"),
    live=Path("reports/live"),
    work=Path(".work/train"),
    tensorboard=Path(".work/tensorboard"),
    log=Path(".work/log"),
    costs=Path(".work/plan/costs.json"),
    root=Path(),
)


def run(params: Params) -> None:
    """Train as `params.train` asks."""
    train(params.seed, params.train, PATHS)


if __name__ == "__main__":
    run_stage(run)
