"""A whole training: from the packed store to a checkpoint, resumed where an equal one was killed.

Every rank runs this; rank 0 alone writes results. The seed of the weights, the order of rows,
augmentation and dropout are functions of `seed`, so equal inputs give equal weights.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import pytorch_lightning as pl
from torch import distributed

from slipway.config.sections import TrainParams
from slipway.kinds.registry import is_classification
from slipway.system import files
from slipway.training.assembly import (
    SetupCheck,
    freezing,
    prepare_process,
    step_arguments,
    training_batches,
    training_module,
)
from slipway.training.batches.batches import ValidationBatches, training_loader, validation_loader
from slipway.training.checkpoints.callback import Saver
from slipway.training.checkpoints.checkpoints import Save
from slipway.training.checkpoints.resuming import Resumption
from slipway.training.distributed.faults import report_bus_errors
from slipway.training.distributed.processes import (
    disable_lightning_signals,
    end_with_parent,
    is_first_process,
    launched_rank,
    report_error_once,
    terminate_ranks_together,
    was_started_by_another,
)
from slipway.training.distributed.stopping import Stopped, StopSignals, requeue
from slipway.training.finishing import write_checkpoint
from slipway.training.job import Job, Paths, count_parameters, prepare
from slipway.training.networks.networks import Network
from slipway.training.recipe.early_stopping import has_ended
from slipway.training.recipe.weight_average import WeightAverage
from slipway.training.telemetry.costs import CostMeter, write_costs
from slipway.training.telemetry.progress import (
    EpochLines,
    log_finished,
    loggers,
    progress_bars,
    silence_chatter,
)
from slipway.training.telemetry.run_log import RunLog
from slipway.training.telemetry.start_lines import in_words, print_start
from slipway.training.telemetry.step_clock import StepClock
from slipway.training.telemetry.telemetry import StepTelemetry, Where


def train(seed: int, params: TrainParams, paths: Paths) -> None:
    """Train as `params` ask and write the checkpoint and its metrics.

    ParamsError, UnavailableError: it cannot run as asked. TrainingError: it went wrong. LockedError: another one runs.
    """
    silence_chatter()
    report_bus_errors()
    rank, world_size = launched_rank()
    with RunLog(paths.log, rank) as log:
        with report_error_once(rank, world_size):
            job, network = prepare(seed, params, paths)
        log.name_run(job.fingerprint.name)
        _train(job, network, log)


def _train(job: Job, network: Network, log: RunLog) -> None:
    first, num_parameters = (
        is_first_process(),
        count_parameters(network),
    )  # before ZeRO-3 cuts it up
    if was_started_by_another():
        end_with_parent()
    with files.lock(job.paths.work / "lock", "a training") if first else nullcontext():
        resumed, problems = job.saves.newest()
        if first:
            job.saves.open()
            notes = [*problems, *job.saves.others()]
            print_start(job, num_parameters, notes, resumed)
            log.write(
                "started",
                resumed_step=_first_step(job, resumed),
                notes=notes,
                **asdict(job.placement),
            )
        meter = CostMeter(job.saves.root)
        if trains := resumed is None or not has_ended(resumed.history, job.params):
            _fit(job, network, resumed, log, meter)
        elif first:
            log_finished(job.paths.live, resumed.history if resumed else [])
        if first:
            write_checkpoint(job)
            log.write("finished")
            if trains:
                write_costs(
                    job.paths.costs,
                    job.fingerprint.name,
                    num_parameters,
                    meter,
                    job.paths.checkpoint,
                    job.board,
                )
    if distributed.is_initialized():
        distributed.destroy_process_group()  # or a thread of gloo may abort a process that ends before the first does


def _fit(job: Job, network: Network, resumed: Save | None, log: RunLog, meter: CostMeter) -> None:
    params, placement, data, shape = job.params, job.placement, job.data, job.shape
    stretch = job.stretch(resumed)
    prepare_process(params, placement, network, stretch.threads)
    signals, clock = StopSignals(), StepClock()
    steps = {"steps_per_epoch": job.steps_per_epoch, "num_accumulated": shape.num_accumulated}
    average = [WeightAverage(network, params.ema_decay)] if params.ema_decay else []
    resumption = Resumption(job.saves, resumed, stretch, average, **steps)
    saver = Saver(job.saves, resumed, stretch, params, signals, average, **steps)
    lines = EpochLines(saver, shape.batch_size, clock)
    telemetry = StepTelemetry(params, _where(job, resumed), log, clock)
    bars = progress_bars(telemetry)
    trainer = pl.Trainer(
        **step_arguments(params, placement, shape, job.paths.work),
        max_epochs=params.epochs,
        callbacks=[
            SetupCheck(placement),
            resumption,
            *freezing(network, params),
            *average,
            lines,
            telemetry,
            meter,
            saver,
            *bars,
        ],
        logger=loggers(job.paths.live) if is_first_process() else False,
        profiler=clock,
        enable_progress_bar=bool(bars),
    )
    on_gpu, classes = placement.accelerator == "gpu", is_classification(data.manifest.task)
    batches = training_batches(data, shape, trainer.global_rank, job.seed, on_gpu=on_gpu)
    validation = ValidationBatches(
        data.val,
        params.max_batch_per_device,
        placement.world_size,
        trainer.global_rank,
        classes=classes,
    )
    resumption.load_weights(network)
    disable_lightning_signals(trainer)
    with terminate_ranks_together(trainer), handle_stop_signals(saver, signals):
        trainer.fit(
            training_module(network, params, job.seed, data, batches),
            training_loader(
                batches, params.num_workers, pin_memory=on_gpu, **resumption.first_place
            ),
            validation_loader(validation, params.num_workers, pin_memory=on_gpu),
            ckpt_path=resumption.trainer_state,
            weights_only=True,
        )


@contextmanager
def handle_stop_signals(saver: Saver, signals: StopSignals) -> Iterator[None]:
    """Signals stop the training in the block; rank 0 tells where it stands then, and puts a Slurm job back into the queue."""
    signals.listen()
    try:
        yield
        if signals.received:
            raise Stopped(signals.received)
    except Stopped as stopped:
        if is_first_process():
            requeued = requeue() if stopped.signal == signal.SIGUSR1 else None
            what_next = requeued or "run the same command again to go on"
            print(
                f"stopped   by {stopped.signal.name} {in_words(saver.saved)}, all saved; {what_next}",
                flush=True,
            )
        raise
    finally:
        signals.release()


def _where(job: Job, resumed: Save | None) -> Where:
    return Where(
        board=job.board,
        rows_per_step=job.shape.batch_size,
        num_accumulated=job.shape.num_accumulated,
        steps_per_epoch=job.steps_per_epoch,
        history=resumed.history if resumed else [],
    )


def _first_step(job: Job, resumed: Save | None) -> int:
    return resumed.position.total_steps(job.steps_per_epoch) if resumed else 0
