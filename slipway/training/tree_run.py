"""Trains boosted trees, from the packed store to the model.

Such a training takes seconds and saves no checkpoints: a killed one starts from the first round.
The same seed gives the same bytes.
"""

from slipway.config.seals import check_inputs
from slipway.config.training import TrainParams
from slipway.system import files
from slipway.training.checkpoints.checkpoints import Checkpoint
from slipway.training.distributed.processes import is_first_process
from slipway.training.job import Job
from slipway.training.networks.networks import Network, save_model
from slipway.training.networks.trees import TreeNetwork
from slipway.training.run import model_manifest, training_metrics
from slipway.training.telemetry.progress import log_finished, print_patience
from slipway.training.telemetry.run_log import RunLog
from slipway.training.trees.booster import FittedTrees, History, fit_trees

_LINES = 10  # lines of progress


def train_trees(job: Job, network: Network, log: RunLog) -> None:
    """Fit the trees of `job` and write the model and its metrics.

    Raises TrainingError if no split is found, SealError if the inputs changed meanwhile.
    """
    if not is_first_process():
        return
    assert isinstance(network, TreeNetwork)
    with files.lock(job.paths.work / "lock", "a training"):
        threads = job.segment().threads or 1
        _print_start(job, network, threads)
        log.write("started", resumed_step=0, threads=threads)
        fitted = fit_trees(
            network,
            job.seed,
            job.params,
            job.data,
            threads,
            lambda history: _print_round(job.params, history),
        )
        _write(job, network, fitted)
        log.write("finished")


def _print_start(job: Job, network: TreeNetwork, threads: int) -> None:
    params, spec = job.params, job.spec
    outputs = f"{len(spec.classes)} classes" if spec.classes else "a number"
    columns = len(network.inputs.names) + len(network.inputs.categories)
    print(
        f"network   {spec.name}, up to {params.epochs} rounds of trees with up to "
        f"{network.arguments.num_leaves} leaves, {columns} columns -> {outputs}"
    )
    print(f"rows      {job.data.num_train:,} for training, {len(job.data.val):,} for validation")
    many = "s" * (threads > 1)
    print(f"runs as   one process with {threads} thread{many} on the CPU, no resume", flush=True)
    print_patience(job)


def _print_round(params: TrainParams, history: History) -> None:
    number, every = len(history), max(1, params.epochs // _LINES)
    if number % every and number > 1:
        return
    shown = {
        name: value for name, value in history[-1].items() if name.startswith(("train", "val"))
    }
    figures = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
    print(f"round {number:>{len(str(params.epochs))}}/{params.epochs}  {figures}", flush=True)


def _write(job: Job, network: TreeNetwork, fitted: FittedTrees) -> None:
    last = Checkpoint(
        format_version=3,
        epoch=len(fitted.history),
        step=0,
        kept_epoch=fitted.kept_round,
        history=fitted.history,
        segments=[job.segment()],
        actual=job.placement.expected,
        files={},
    )
    manifest = model_manifest(job, last, network.num_parameters)
    log_finished(job.paths.live, fitted.history)
    files.write_json(job.paths.metrics, training_metrics(manifest, last))
    save_model(job.paths.model, manifest, fitted.text.encode())
    check_inputs()
    if manifest.stopped_early:
        print(f"stopped   after round {last.epoch}: the validation loss fell no more")
    print(
        f"kept round {last.kept_epoch} of {last.epoch} ({job.params.keep}) in {job.paths.model}, "
        f"measured on {len(job.data.val):,} validation rows"
    )
