"""Trains the network on the packed store and writes `artifacts/model/` and `metrics/train.json`."""

from slipway.config.command import run_stage
from slipway.config.params import Params


def run(params: Params) -> None:
    """Train as `params.train` says, in as many processes as it says."""
    # Imported here because they write caches: `run_stage` then reports a full or read-only disk.
    from slipway.training.distributed.launchers import relaunch
    from slipway.training.job import PROJECT_PATHS
    from slipway.training.run import train

    relaunch("stages.train")
    train(params.seed, params.train, PROJECT_PATHS)


if __name__ == "__main__":
    run_stage(run)
