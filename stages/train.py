"""Trains the network on the packed store and writes `artifacts/model/` and `metrics/train.json`."""

from slipway.config.command import run_stage
from slipway.config.params import Params


def run(params: Params) -> None:
    """Train as `params.train` asks, in as many processes as it asks for."""
    # Here, since these write caches when they are imported: a disk that refuses is then told as one.
    from slipway.training.distributed.launchers import relaunch
    from slipway.training.job import PROJECT_PATHS
    from slipway.training.run import train

    relaunch("stages.train")
    train(params.seed, params.train, PROJECT_PATHS)


if __name__ == "__main__":
    run_stage(run)
