"""train: trains the network or an ensemble; writes `artifacts/model/` and metrics."""

from slipway.config.params import Params
from slipway.config.stage_run import run_stage


def run(params: Params) -> None:
    """Train in as many processes as `params.train` requests."""
    # Imported here because they write caches: `run_stage` then reports a full or read-only disk.
    from slipway.training.distributed.launchers import relaunch
    from slipway.training.ensemble_run import train_ensemble
    from slipway.training.job import PROJECT_PATHS
    from slipway.training.run import train

    relaunch("slipway.stages.train")
    if params.ensemble.method is not None:
        train_ensemble(params, PROJECT_PATHS)
        return
    train(params.seed, params.train, PROJECT_PATHS)


if __name__ == "__main__":
    run_stage(run)
