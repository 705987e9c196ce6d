"""How a training goes on from a save: with every bit where it is cut over processes as it was, else with the same rows.

Where the strategy or the number of processes is another one, weights, optimizer and schedule are put together by name and given to
the new processes. Sums are then added in another order, so the last bits differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor

from slipway.system.errors import TrainingError
from slipway.training.checkpoints.checkpoints import Save, Saves
from slipway.training.checkpoints.consolidation import (
    ConsolidatedState,
    consolidated_state,
    network_weights,
)
from slipway.training.checkpoints.positions import Position, loop_state, move_to
from slipway.training.checkpoints.rank_state import restore_rank_state
from slipway.training.networks.networks import Network, Stretch
from slipway.training.recipe.weight_average import WeightAverage


class Resumption(pl.Callback):
    """Puts the trainer where `save` was taken; without one, at the beginning."""

    def __init__(
        self,
        saves: Saves,
        save: Save | None,
        stretch: Stretch,
        averages: Sequence[WeightAverage] = (),
        *,
        steps_per_epoch: int,
        num_accumulated: int,
    ) -> None:
        self._saves, self._save, self._stretch, self._averages = saves, save, stretch, averages
        self._shape = (steps_per_epoch, num_accumulated)
        self.position = save.position if save else Position(0, 0)
        self._carried: ConsolidatedState | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the processes are those of the save."""
        return self._save is not None and self._save.stretches[-1].is_cut_as(self._stretch)

    @property
    def first_place(self) -> dict[str, int]:
        """Where the loader begins, as arguments of `training_loader`."""
        return {
            "first_epoch": self.position.epoch,
            "first_batch": self.position.step * self._shape[1],
        }

    @property
    def trainer_state(self) -> str | None:
        """What the trainer itself has to load."""
        return str(self._saves.state(self.position)) if self.is_exact else None

    def load_weights(self, network: Network) -> None:
        """Before the strategy takes the network apart."""
        if self._save and not self.is_exact:
            self._carried = consolidated_state(self._saves.state(self.position))
            network.load_state_dict(network_weights(self._carried.weights), strict=True)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["loops"]["fit_loop"] = loop_state(trainer, self.position, *self._shape)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._carried is None:
            return
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            _give_to_deepspeed(
                trainer.strategy.deepspeed_engine.optimizer, pl_module, self._carried
            )
        else:
            _give_to_optimizer(
                trainer.optimizers[0], pl_module.optimizer_names, self._carried.optimizer
            )
        _give_schedule(trainer, self._carried.rest["lr_schedulers"])
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if callback.state_key in self._carried.rest["callbacks"]:
                callback.load_state_dict(self._carried.rest["callbacks"][callback.state_key])
        pl_module.guard.load_state_dict(self._carried.rest["guard"])
        move_to(trainer, self.position, *self._shape)
        self._carried = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """TrainingError where ranks have resumed from different saves."""
        first = trainer.strategy.broadcast(self.position)
        if first != self.position or first.epoch != trainer.current_epoch:
            raise TrainingError(
                f"rank {trainer.global_rank} starts at {self.position}, rank 0 at {first}. "
                "All nodes need the project on one shared file system."
            )
        if self._save:
            saved_world_size = self._save.stretches[-1].world_size
            folder = self._saves.folder(self.position)
            restore_rank_state(
                pl_module,
                self._averages,
                trainer.global_rank,
                trainer.world_size,
                saved_world_size,
                folder,
            )


def _give_to_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], states: Mapping[str, dict[str, Tensor]]
) -> None:
    state = {
        index: {key: value.clone() for key, value in states[name].items()}
        for index, name in enumerate(names)
        if name in states
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _give_to_deepspeed(zero: Any, module: torch.nn.Module, carried: ConsolidatedState) -> None:
    """Into the float32 masters and the optimizer's states, of which each process has a flat part."""
    example = next(iter(carried.optimizer.values()), {})
    is_stage_3 = hasattr(zero, "fp32_partitioned_groups_flat")
    for master in (
        zero.fp32_partitioned_groups_flat if is_stage_3 else zero.single_partition_of_fp32_groups
    ):
        # DeepSpeed makes them in the first step, from which it would start then.
        zero.optimizer.state[master] = {
            key: torch.zeros_like(master) if value.ndim else value.clone()
            for key, value in example.items()
        }
    if not is_stage_3:
        zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        values = {
            key: value for key, value in carried.optimizer.get(name, {}).items() if value.ndim
        }
        (_set_partition if is_stage_3 else _set_fragment)(parameter, carried.weights[name], values)


def _set_fragment(
    parameter: torch.nn.Parameter, master: Tensor, states: Mapping[str, Tensor]
) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    safe_set_full_fp32_param(parameter, master)
    for key, value in states.items():
        safe_set_full_optimizer_state(parameter, value, key)


def _set_partition(
    parameter: torch.nn.Parameter, master: Tensor, states: Mapping[str, Tensor]
) -> None:
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    safe_set_local_fp32_param(parameter, _partition(master, parameter))
    for key, value in states.items():
        safe_set_local_optimizer_state(parameter, _partition(value, parameter), key)


def _partition(value: Tensor, parameter: Any) -> Tensor:
    """This rank's part of a weight, filled up with zeros as ZeRO-3 does."""
    size, rank = parameter.ds_tensor.ds_numel, torch.distributed.get_rank()
    flat = torch.zeros(size * torch.distributed.get_world_size())
    flat[: value.numel()] = value.flatten()
    return flat[rank * size : (rank + 1) * size]


def _give_schedule(trainer: pl.Trainer, saved: list[dict[str, Any]]) -> None:
    for config, state in zip(trainer.lr_scheduler_configs, saved, strict=True):
        config.scheduler.load_state_dict(state)
        for group, learning_rate in zip(
            trainer.optimizers[0].param_groups, config.scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = learning_rate
