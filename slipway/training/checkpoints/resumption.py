"""Resumes training from a checkpoint, bit-exact if the process layout is unchanged.

With another strategy or number of processes the batches stay the same. Weights, optimizer and
schedule are merged by name and distributed to the new processes. Sums are then added in another
order, so results may differ in the last bits.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DeepSpeedStrategy

from slipway.artifacts.training_setup import RunSegment
from slipway.system.errors import TrainingError
from slipway.training.checkpoints.checkpoints import Checkpoint, CheckpointStore, TrainingPosition
from slipway.training.checkpoints.consolidation import (
    ConsolidatedState,
    consolidated_state,
    load_weights,
    network_weights,
)
from slipway.training.checkpoints.rank_state import restore_rank_state
from slipway.training.distributed.shards import load_optimizer, zero_part
from slipway.training.networks.networks import Network
from slipway.training.recipe.weight_average import WeightAverage


class Resumption(pl.Callback):
    """Restores the trainer from `checkpoint`; None starts the training from the beginning."""

    def __init__(
        self,
        store: CheckpointStore,
        checkpoint: Checkpoint | None,
        segment: RunSegment,
        averages: Sequence[WeightAverage] = (),
        *,
        steps_per_epoch: int,
        num_accumulated: int,
    ) -> None:
        self._store, self._checkpoint, self._averages = store, checkpoint, averages
        self._steps_per_epoch, self._num_accumulated = steps_per_epoch, num_accumulated
        self.position = checkpoint.position if checkpoint else TrainingPosition(0, 0)
        self.is_exact = bool(checkpoint and checkpoint.segments[-1].has_same_layout(segment))
        self._state: ConsolidatedState | None = None  # state to distribute if the layout differs

    @property
    def first_batch(self) -> dict[str, int]:
        """The first epoch and batch to load, as keyword arguments of `training_loader`."""
        return {
            "first_epoch": self.position.epoch,
            "first_batch": self.position.step * self._num_accumulated,
        }

    @property
    def trainer_state(self) -> str | None:
        """The state that Lightning loads; None at the start or if the process layout changed."""
        return str(self._store.state(self.position)) if self.is_exact else None

    def load_weights(self, network: Network) -> None:
        """Load consolidated weights into the network before the strategy shards it."""
        if self._checkpoint and not self.is_exact:
            self._state = consolidated_state(self._store.state(self.position))
            with network.mapped or nullcontext():
                load_weights(network, network_weights(self._state.weights))

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["loops"]["fit_loop"] = self._loop_state(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Distribute the consolidated state over the processes."""
        state = self._state
        if state is None:
            return
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            _restore_deepspeed(trainer.strategy.deepspeed_engine.optimizer, pl_module, state)
        else:
            optimizer = trainer.optimizers[0]
            _restore_optimizer(optimizer, pl_module.optimizer_names, state.optimizer)
        _restore_schedule(trainer, state.rest["lr_schedulers"])
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if callback.state_key in state.rest["callbacks"]:
                callback.load_state_dict(state.rest["callbacks"][callback.state_key])
        pl_module.nonfinite_guard.load_state_dict(state.rest["guard"])
        trainer.fit_loop.load_state_dict(self._loop_state(trainer))
        self._state = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Restore the state of this rank.

        Raises TrainingError if the ranks have different checkpoints.
        """
        first = trainer.strategy.broadcast(self.position)
        if first != self.position or first.epoch != trainer.current_epoch:
            raise TrainingError(
                f"rank {trainer.global_rank} starts at {self.position}, rank 0 at {first}. "
                "All nodes need the project on one shared file system."
            )
        if self._checkpoint:
            restore_rank_state(
                pl_module,
                self._averages,
                trainer.global_rank,
                trainer.world_size,
                self._checkpoint.segments[-1].world_size,
                self._store.folder(self.position),
            )

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Go back to the newest checkpoint after a loss spike, if the params request it."""
        if pl_module.nonfinite_guard.take_rewind():
            self._rewind(trainer, pl_module)

    def _rewind(self, trainer: pl.Trainer, module: Any) -> None:
        """Restore the weights, optimizer and averages of the newest checkpoint.

        The position in the epoch does not change, so no step is repeated. Raises TrainingError if
        the ranks find different checkpoints.
        """
        saved, problems = self._store.newest()
        position = saved.position if saved else None
        if (first := trainer.strategy.broadcast(position)) != position:
            raise TrainingError(
                f"rank {trainer.global_rank} would go back to {position}, rank 0 to {first}. "
                "All nodes need the project on one shared file system."
            )
        if saved is None or position is None:
            if trainer.is_global_zero:
                print("rewound   to nowhere: there is no checkpoint yet; the spike is skipped")
            return
        state = consolidated_state(self._store.state(position))
        module.network.load_state_dict(network_weights(state.weights), strict=True)
        _restore_optimizer(trainer.optimizers[0], module.optimizer_names, state.optimizer)
        for average in self._averages:
            average.load_state_dict(state.rest["callbacks"][average.state_key])
            average.on_train_start(trainer, module)
        guard = module.nonfinite_guard
        guard.load_state_dict({**state.rest["guard"], "num_skipped": guard.num_skipped})
        restore_rank_state(
            module,
            self._averages,
            trainer.global_rank,
            trainer.world_size,
            saved.segments[-1].world_size,
            self._store.folder(position),
        )
        if position.epoch != trainer.current_epoch or position.step == 0:
            module.train_sums.totals = {}  # those of an earlier epoch
        if trainer.is_global_zero:
            first_step = position.total_steps(self._steps_per_epoch) + 1
            print(
                f"rewound   to the checkpoint after epoch {position.epoch} and {position.step} "
                f"steps of the next; steps {first_step} to {trainer.global_step} are left out",
                *problems,
                flush=True,
            )

    def _loop_state(self, trainer: pl.Trainer) -> dict[str, Any]:
        return loop_state(trainer, self.position, self._steps_per_epoch, self._num_accumulated)


def loop_state(
    trainer: pl.Trainer, position: TrainingPosition, steps_per_epoch: int, num_accumulated: int
) -> dict[str, Any]:
    """Return the state of `trainer.fit_loop` at `position`, in Lightning's own format.

    Lightning 2.6 restores its counters differently for each hook in which a checkpoint may be
    saved, and then skips or repeats batches or a validation. Order and augmentation are functions
    of the position here, so the counters are computed from it as well.
    """
    state: dict[str, Any] = trainer.fit_loop.state_dict()
    steps = position.total_steps(steps_per_epoch)
    started = position.epoch + (position.step > 0)
    state["epoch_progress"] = _total_and_current(
        ready=started, started=started, processed=position.epoch, completed=position.epoch
    )
    state["epoch_loop.state_dict"] = {"_batches_that_stepped": steps}
    is_validating = position.step == steps_per_epoch
    counters = ("ready", "started", "processed", "completed")
    state["epoch_loop.batch_progress"] = {
        "total": dict.fromkeys(counters, steps * num_accumulated),
        "current": dict.fromkeys(counters, position.step * num_accumulated),
        "is_last_batch": is_validating,
    }
    state["epoch_loop.scheduler_progress"] = _total_and_current(ready=steps, completed=steps)
    state["epoch_loop.automatic_optimization.optim_progress"] = {
        "optimizer": {
            "step": _total_and_current(ready=steps, completed=steps),
            "zero_grad": _total_and_current(ready=steps, started=steps, completed=steps),
        }
    }
    # A validation that has started and not completed makes the trainer validate first.
    started = int(is_validating)
    state["epoch_loop.val_loop.batch_progress"] = {
        **_total_and_current(ready=started, started=started, processed=0, completed=0),
        "is_last_batch": False,
    }
    return state


def _total_and_current(**counts: int) -> dict[str, dict[str, int]]:
    return {"total": dict(counts), "current": dict(counts)}


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], states: Mapping[str, dict[str, Any]]
) -> None:
    state = {index: states[name] for index, name in enumerate(names) if name in states}
    load_optimizer(optimizer, {**optimizer.state_dict(), "state": state})


def _restore_deepspeed(zero: Any, module: torch.nn.Module, state: ConsolidatedState) -> None:
    """Restore this process's part of the float32 weights and optimizer states of ZeRO."""
    from deepspeed import utils

    example = next(iter(state.optimizer.values()), {})
    is_stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
    masters = (
        zero.fp32_partitioned_groups_flat if is_stage_3 else zero.single_partition_of_fp32_groups
    )
    for master in masters:
        # DeepSpeed would create them in the first step, and start from zero.
        zero.optimizer.state[master] = {
            key: torch.zeros_like(master) if value.shape else value.clone()
            for key, value in example.items()
        }
    set_weight, set_state = (
        (utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state)
        if is_stage_3
        else (utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state)
    )
    if not is_stage_3:
        zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        for key, value in {"": state.weights[name], **state.optimizer.get(name, {})}.items():
            if value.shape or not key:
                part = value.contiguous()
                part = zero_part(part, parameter) if is_stage_3 else part
                set_state(parameter, part, key) if key else set_weight(parameter, part)


def _restore_schedule(trainer: pl.Trainer, saved: list[dict[str, Any]]) -> None:
    groups = trainer.optimizers[0].param_groups
    for config, state in zip(trainer.lr_scheduler_configs, saved, strict=True):
        config.scheduler.load_state_dict(state)
        for group, rate in zip(groups, config.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
