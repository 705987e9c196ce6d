"""Reports a training to experiment trackers: MLflow and Weights & Biases.

Rank 0 reports to those listed in `train.loggers`. They receive the settings once, and the same
scalars as TensorBoard by optimizer step. Data stays on this machine unless an environment variable
sets a server. A tracker that fails is disabled, and the training continues.

`.work/train/NAME/trackers.json`, next to the checkpoints, holds the id of each run, so that a
resumed training continues the same runs.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pytorch_lightning.loggers import MLFlowLogger, WandbLogger

from slipway.config.training import Tracker
from slipway.system import files
from slipway.system.contract import Contract
from slipway.training.job import Job
from slipway.training.telemetry.run_log import RunLog

_FILE = "trackers.json"
_SERVER = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
_FINISH_S = 300.0  # time limit of W&B's upload at the end, which waits forever by default


class TrackedRun(Contract):
    """The id under which a tracker records this training."""

    id: str | None  # null if the tracker failed before it began
    failure: str | None  # why the tracker lacks a part of the training


class Trackers:
    """The active trackers of a training; empty on ranks other than 0."""

    def __init__(self, job: Job, log: RunLog) -> None:
        self._job, self._log = job, log
        self._loggers: dict[Tracker, MLFlowLogger | WandbLogger] = {}
        self._runs = tracked_runs(job.store.root)

    def start(self, history: Sequence[Mapping[str, float]]) -> None:
        """Continue the runs, or create new ones with settings and metrics of past epochs."""
        for name in self._job.params.loggers:
            self._guard(name, partial(self._open, name, history))

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Report scalars of an optimizer step to all active trackers."""
        for name, logger in list(self._loggers.items()):
            self._guard(name, partial(logger.log_metrics, dict(values), step))

    def finish(self, *, failed: bool) -> None:
        """Close the runs. A training that is resumed later continues them."""
        for name, logger in list(self._loggers.items()):
            self._guard(name, partial(_finish, logger, failed=failed))
        self._loggers.clear()

    def _open(self, name: Tracker, history: Sequence[Mapping[str, float]]) -> None:
        known = self._runs.get(name)
        logger = _OPENERS[name](self._job, known.id if known else None)
        experiment = logger.experiment  # the run begins here
        run = TrackedRun(id=logger.version, failure=known.failure if known else None)
        self._loggers[name] = logger
        if known and known.id and isinstance(logger, MLFlowLogger):
            experiment.update_run(run.id, status="RUNNING")
            return  # W&B, however, may have lost all that a killed process had buffered
        self._note(name, run)
        settings = self._job.params.model_dump(mode="json")
        logger.log_hyperparams({"seed": self._job.seed, "train": settings})
        for epoch, metrics in enumerate(history, start=1):
            logger.log_metrics(dict(metrics), epoch * self._job.steps_per_epoch)

    def _guard(self, name: Tracker, act: Callable[[], None]) -> None:
        """Call `act`. If it raises, disable the tracker and print the reason."""
        try:
            act()
        except Exception as error:
            self._loggers.pop(name, None)
            text = re.sub(r"//[^/\s]*@", "//", f"{type(error).__name__}: {error}")  # a password
            reason = " ".join(text.split())[:300]
            known = self._runs.get(name)
            self._note(name, TrackedRun(id=known.id if known else None, failure=reason))
            self._log.write("logger_failed", logger=name, error=reason)
            print(
                f"note      logger {name} failed and is left out, the training continues "
                f"without it ({reason})",
                flush=True,
            )

    def _note(self, name: Tracker, run: TrackedRun) -> None:
        self._runs[name] = run
        content = {name: run.model_dump(mode="json") for name, run in self._runs.items()}
        files.write_json(self._job.store.root / _FILE, content)


def tracked_runs(root: Path) -> dict[Tracker, TrackedRun]:
    """Read the tracked runs of the training whose checkpoints are in `root`.

    Returns no runs if the training has not started.
    """
    try:
        content = json.loads((root / _FILE).read_bytes())
        return {name: TrackedRun.model_validate(run) for name, run in content.items()}
    except (FileNotFoundError, ValueError):
        return {}


def _open_mlflow(job: Job, run_id: str | None) -> MLFlowLogger | WandbLogger:
    for name, value in _SERVER.items():
        os.environ.setdefault(name, value)
    # MLflow warns of each new experiment.
    logging.getLogger("pytorch_lightning.loggers.mlflow").setLevel(logging.ERROR)
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        # MLflow's client alone has no database; its server reads this folder with the same switch.
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        uri = (_folder(job) / "mlflow").as_uri()
    return MLFlowLogger(
        experiment_name=os.environ.get("MLFLOW_EXPERIMENT_NAME") or _project(job),
        run_name=job.fingerprint.name,
        tracking_uri=uri,
        run_id=run_id,
    )


def _open_wandb(job: Job, run_id: str | None) -> MLFlowLogger | WandbLogger:
    folder = _folder(job)
    for name in ("CACHE", "CONFIG", "DATA"):  # these folders are in the user's home by default
        os.environ.setdefault(f"WANDB_{name}_DIR", str(folder / "wandb" / name.lower()))
    import wandb

    is_online = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY")
    run = wandb.init(
        name=job.fingerprint.name,
        project=os.environ.get("WANDB_PROJECT") or _project(job),
        dir=folder,
        id=run_id,
        resume="allow",
        mode=None if is_online else "offline",
        settings=wandb.Settings(
            console="off", silent=True, x_disable_stats=True, finish_timeout=_FINISH_S
        ),
    )
    # The logger's own init does the same, but warns of an argument that it passes itself.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run)


_OPENERS: dict[Tracker, Callable[[Job, str | None], MLFlowLogger | WandbLogger]] = {
    "mlflow": _open_mlflow,
    "wandb": _open_wandb,
}


def _finish(logger: MLFlowLogger | WandbLogger, *, failed: bool) -> None:
    logger.finalize("failed" if failed else "success")
    if isinstance(logger, WandbLogger):
        logger.experiment.finish(exit_code=int(failed))


def _folder(job: Job) -> Path:
    return job.paths.work.parent.resolve()


def _project(job: Job) -> str:
    """Return the name of the project's folder, in characters that both trackers allow."""
    return re.sub(r"[^\w.-]", "-", job.paths.root.resolve().name)[:100] or "slipway"
