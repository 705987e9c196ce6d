"""Runs a whole training, from the packed store to the model, and resumes a killed one.

Every rank runs this; only rank 0 writes results. Weights, order of rows, augmentation and dropout
are functions of `seed`, so equal inputs give equal weights.
"""

import gc
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import pytorch_lightning as pl
from torch import distributed

from slipway.config.seals import check_inputs
from slipway.config.training import TrainParams
from slipway.kinds.code_digest import user_code
from slipway.kinds.registry import are_trees, input_kind
from slipway.system import files
from slipway.system.errors import TrainingError
from slipway.system.malloc import return_memory_to_os
from slipway.system.version import git
from slipway.training.assembly import (
    SetupCheck,
    freeze_callbacks,
    prepare_process,
    step_arguments,
    training_batches,
    training_module,
    validation_batches,
)
from slipway.training.batches.batches import batch_loader, training_loader
from slipway.training.checkpoints.callback import CheckpointCallback
from slipway.training.checkpoints.checkpoints import Checkpoint, TrainingPosition
from slipway.training.checkpoints.consolidation import consolidated_weights, load_weights
from slipway.training.checkpoints.resumption import Resumption
from slipway.training.distributed.faults import report_bus_errors
from slipway.training.distributed.placement import requested_setup
from slipway.training.distributed.processes import (
    disable_lightning_signals,
    end_with_parent,
    is_first_process,
    launched_rank,
    report_error_once,
    terminate_ranks_together,
    was_started_by_another,
)
from slipway.training.distributed.stop_signals import (
    Paused,
    Stopped,
    StopSignals,
    pause_epoch,
    requeue,
)
from slipway.training.distributed.strategies import PortableDeepSpeedStrategy
from slipway.training.frozen_features import FeatureCallback, FeatureStore, frozen_body
from slipway.training.job import (
    Job,
    Paths,
    TrainingData,
    count_parameters,
    open_data,
    prepare,
)
from slipway.training.networks.encoders import merged
from slipway.training.networks.frozen_parts import FrozenBody, frozen_weights
from slipway.training.networks.initialization import initial_network
from slipway.training.networks.mapped_weights import MappedWeights
from slipway.training.networks.networks import (
    ModelManifest,
    Network,
    build_network,
    save_model,
)
from slipway.training.recipe.weight_average import WeightAverage
from slipway.training.telemetry.costs import CostMeter, write_costs
from slipway.training.telemetry.progress import (
    EpochLines,
    describe_position,
    log_finished,
    loggers,
    print_start,
    progress_bars,
    silence_chatter,
)
from slipway.training.telemetry.rank_times import STALL_S, RankTimes, StallWatch
from slipway.training.telemetry.run_log import RunLog
from slipway.training.telemetry.telemetry import (
    DataWaitProfiler,
    StepTelemetry,
    TelemetryContext,
)
from slipway.training.telemetry.tracker_packages import check_trackers
from slipway.training.telemetry.trackers import Trackers, tracked_runs


def train(seed: int, params: TrainParams, paths: Paths) -> None:
    """Train with `params`, and write the model and its metrics.

    Raises ParamsError or UnavailableError if the training is impossible on this machine,
    TrainingError if the training fails, LockedError if another training is running.
    """
    silence_chatter()
    report_bus_errors()
    rank, world_size = launched_rank()
    with RunLog(paths.log, rank) as log:
        with report_error_once(rank, world_size):
            if rank == 0:
                check_trackers(params)
            job, network = prepare(seed, params, paths)
        log.name_run(job.fingerprint.name)
        if are_trees(params.network):
            fit: Callable[[Job, Network, RunLog], None]
            fit = input_kind(job.spec.input.kind).load_part("train_trees")
            fit(job, network, log)
        else:
            _train(job, network, log)


def _train(job: Job, network: Network, log: RunLog) -> None:
    is_first = is_first_process()
    num_parameters = count_parameters(network)  # counted before ZeRO-3 shards them
    if was_started_by_another():
        end_with_parent()
    with files.lock(job.paths.work / "lock", "a training") if is_first else nullcontext():
        resumed, problems = job.store.newest()
        if is_first:
            _report_start(job, num_parameters, resumed, problems, log)
        meter = CostMeter(job.store.root)
        if trains := resumed is None or not job.has_ended(resumed.history):
            _fit(job, network, resumed, log, meter)
            _free_training(network)
        elif is_first:
            log_finished(job.paths.live, resumed.history if resumed else [])
            trackers = Trackers(job, log)
            trackers.start(resumed.history if resumed else [])
            trackers.finish(failed=False)
        if is_first:
            write_model(job)
            log.write("finished")
            if trains:
                write_costs(
                    job.paths.costs,
                    job.fingerprint.name,
                    num_parameters,
                    meter,
                    job.paths.model,
                    job.board,
                )
    if distributed.is_initialized():
        # Otherwise gloo may abort a process that ends before rank 0.
        distributed.destroy_process_group()


def _free_training(network: Network) -> None:
    """Free weights, gradients and the optimizer, because writing the model needs the memory."""
    network.__dict__.clear()  # callers still hold the network
    gc.collect()
    return_memory_to_os()


def _report_start(
    job: Job, num_parameters: int, resumed: Checkpoint | None, problems: list[str], log: RunLog
) -> None:
    job.store.prepare()
    notes = [*problems, *job.store.describe_others()]
    print_start(job, num_parameters, notes, resumed)
    step = resumed.position.total_steps(job.steps_per_epoch) if resumed else 0
    log.write("started", resumed_step=step, notes=notes, **asdict(job.placement))


def _fit(
    job: Job, network: Network, resumed: Checkpoint | None, log: RunLog, meter: CostMeter
) -> None:
    params, placement, shape = job.params, job.placement, job.shape
    segment = job.segment(resumed)
    body = frozen_body(network, params, job.data.plan, placement)
    prepare_process(params, placement, network, segment.threads)
    signals, profiler = StopSignals(), DataWaitProfiler()
    data, stores = _with_features(job, network, body, signals)
    steps = {"steps_per_epoch": job.steps_per_epoch, "num_accumulated": shape.num_accumulated}
    averages = [WeightAverage(network, params.ema_decay)] if params.ema_decay else []
    resumption = Resumption(job.store, resumed, segment, averages, **steps)
    checkpoints = CheckpointCallback(
        job.store,
        resumed,
        segment,
        params,
        signals,
        averages,
        patience=job.patience,
        pause_after=pause_epoch(),
        **steps,
    )
    context = TelemetryContext(
        board=job.board,
        rows_per_step=shape.batch_size,
        num_accumulated=shape.num_accumulated,
        steps_per_epoch=job.steps_per_epoch,
        history=resumed.history if resumed else [],
    )
    trackers = Trackers(job, log) if is_first_process() else None
    telemetry = StepTelemetry(params, context, log, profiler, trackers)
    bars = progress_bars(telemetry)
    watches: list[pl.Callback] = []
    if placement.world_size > 1:
        every = params.log_every_steps
        watches += [
            RankTimes(
                network,
                every,
                shape.num_accumulated,
                log,
                profiler,
                can_be_slow=placement.strategy != "pipeline",
            ),
            StallWatch(job.store.root / "stalled", STALL_S),
        ]
    trainer = pl.Trainer(
        **step_arguments(params, placement, shape, job.paths.work),
        max_epochs=params.epochs,
        callbacks=[
            *stores,
            SetupCheck(placement),
            resumption,
            *freeze_callbacks(network, params),
            *averages,
            EpochLines(checkpoints, shape.batch_size, profiler),
            telemetry,
            *watches,
            meter,
            checkpoints,
            *bars,
        ],
        logger=loggers(job.paths.live) if is_first_process() else False,
        profiler=profiler,
        enable_progress_bar=bool(bars),
    )
    rank, on_gpu = placement.reader(trainer.global_rank), placement.accelerator == "gpu"
    batches = training_batches(data, params, shape, rank, job.seed, on_gpu=on_gpu)
    validation = validation_batches(data, params, placement.num_readers, rank)
    resumption.load_weights(network)
    disable_lightning_signals(trainer)
    with terminate_ranks_together(trainer), _handle_stop_signals(checkpoints, signals):
        trainer.fit(
            training_module(network, params, job.seed, data, batches, placement=placement),
            training_loader(
                batches, params.num_workers, pin_memory=on_gpu, **resumption.first_batch
            ),
            batch_loader(validation, params.num_workers, pin_memory=on_gpu),
            ckpt_path=resumption.trainer_state,
            weights_only=True,
        )
    if isinstance(trainer.strategy, PortableDeepSpeedStrategy):
        trainer.strategy.free()


def _with_features(
    job: Job, network: Network, body: FrozenBody | str | None, signals: StopSignals
) -> tuple[TrainingData, list[pl.Callback]]:
    """Return the data of the training, with the features of a frozen body if they can be stored.

    The callback computes those that are missing. On rank 0 prints why none are stored.
    """
    if not isinstance(body, FrozenBody):
        if body and is_first_process():
            print(f"features  computed in every epoch, because {body}", flush=True)
        return job.data, []
    paths, data = job.paths, job.data
    if paths.left_out:  # the store has all rows, for every training
        data = open_data(paths.packed, paths.augmented, verify=False)
    store = FeatureStore.of(paths.features, network, job.params, data, body, job.placement)
    data = replace(store.attached(), soft=job.data.soft)
    if paths.left_out:
        data = replace(data, train=paths.left_out.without(data.train))
    return data, [FeatureCallback(store, lambda: signals.received)]


@contextmanager
def _handle_stop_signals(checkpoints: CheckpointCallback, signals: StopSignals) -> Iterator[None]:
    """Handle signals that stop the training while the block runs.

    After a stop, rank 0 prints the position and requeues a Slurm job.
    """
    signals.listen()
    try:
        yield
        if signals.received:
            raise Stopped(signals.received)
    except Stopped as stopped:
        if is_first_process():
            requeued = requeue() if stopped.signal == signal.SIGUSR1 else None
            position = describe_position(checkpoints.saved)
            next_step = requeued or "run the same command again to resume"
            print(
                f"stopped   by {stopped.signal.name} {position}, all saved; {next_step}", flush=True
            )
        raise
    except Paused as paused:
        if is_first_process():
            print(f"paused    after epoch {paused.epoch}, all saved", flush=True)
        raise
    finally:
        signals.release()


def write_model(job: Job) -> None:
    """Write the model and its metrics from the last checkpoint, then remove all checkpoints.

    Raises TrainingError if the last checkpoint is damaged. Raises SealError if the inputs changed;
    the checkpoints then stay.
    """
    last, problems = job.store.newest()
    if last is None or not job.has_ended(last.history):
        raise TrainingError(
            "after the last epoch the newest intact checkpoint is of epoch "
            f"{last.epoch if last else 0}: {'; '.join(problems)}. "
            "Run `slipway run` again; it resumes from there."
        )
    weights = consolidated_weights(job.store.state(TrainingPosition(last.kept_epoch, 0)))
    if job.params.freezes_body and job.placement.half_dtype:
        # A process holds them in half precision only, and the features are those of the full one.
        weights = {**weights, **frozen_weights(initial_network(job.seed, job.params, job.spec))}
    network = _network_with(job, weights)
    manifest = model_manifest(job, last, count_parameters(network))
    manifest = manifest.model_copy(update={"network": network.spec})
    failed = {
        name: run.failure for name, run in tracked_runs(job.store.root).items() if run.failure
    }
    lost = {"failed_loggers": ", ".join(failed)} if failed else {}
    files.write_json(job.paths.metrics, {**training_metrics(manifest, last), **lost})
    save_model(job.paths.model, manifest, network.state_dict())
    check_inputs()
    job.store.remove()
    if manifest.stopped_early:
        print(
            f"stopped   after epoch {last.epoch}, {job.patience} after the lowest validation loss"
        )
    for name, failure in failed.items():
        print(f"logger    {name} failed and lacks a part of this training: {failure}")
    print(
        f"kept epoch {last.kept_epoch} of {last.epoch} ({job.params.keep}) in "
        f"{job.paths.model}, measured on {len(job.data.val):,} validation rows"
    )


def model_manifest(job: Job, last: Checkpoint, num_parameters: int) -> ModelManifest:
    """Return the manifest of a training whose last checkpoint is `last`.

    It lacks the digest of the weights.
    """
    params, fingerprint = job.params.model_dump(mode="json"), job.fingerprint
    return ModelManifest(
        format_version=5,
        network=job.spec,
        num_parameters=num_parameters,
        weights_sha256="",  # filled in when the weights are written
        epochs=last.epoch,
        stopped_early=last.epoch < job.params.epochs,
        kept_epoch=last.kept_epoch,
        metrics=last.history[last.kept_epoch - 1],
        requested=requested_setup(job.params).model_copy(
            update={"early_stopping_patience": job.params.early_stopping_patience}
        ),
        actual=last.actual.model_copy(update={"early_stopping_patience": job.patience}),
        segments=last.segments,
        seed=job.seed,
        params=params,
        digests={
            "fingerprint": fingerprint.digest,
            "params": files.digest_json(params),
            **fingerprint.data,
            **fingerprint.code,
        },
        user_code=[
            *user_code(job.paths.root, "train.network", [job.params.network]),
            *user_code(job.paths.root, "train.loss", [job.params.loss]),
        ],
        versions=fingerprint.versions,
        git_revision=git(job.paths.root, "rev-parse", "HEAD"),
    )


def training_metrics(manifest: ModelManifest, last: Checkpoint) -> dict[str, object]:
    """Return the content of `metrics/train.json`."""
    return {
        "epochs": manifest.epochs,
        "stopped_early": manifest.stopped_early,
        "kept_epoch": manifest.kept_epoch,
        **{
            name.replace("/", "_"): value
            for name, value in manifest.metrics.items()
            if name != "learning_rate"
        },
        # The skipped steps of the whole run, not only up to the kept epoch.
        "skipped_steps": int(last.history[-1]["skipped_steps"]),
        "strategy": manifest.actual.strategy,
        "precision": manifest.actual.precision,
        "processes": manifest.actual.world_size,
        "gpus": manifest.actual.world_size if manifest.actual.accelerator == "gpu" else 0,
    }


def _network_with(job: Job, weights: Mapping[str, Any]) -> Network:
    """Return a new network with consolidated weights and without adapters.

    It is in a file if each process held only a part of the weights.
    """
    is_divided = job.placement.divides_weights
    with MappedWeights(job.paths.work.parent) if is_divided else nullcontext():
        network = build_network(job.spec)
        load_weights(network, weights)
        return merged(network)
