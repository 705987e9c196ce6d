"""Exponential moving average (EMA) of the weights in float32.

The average is validated, saved and exported. Training continues with its own weights, which are
restored bit for bit after each validation. The running statistics of BatchNorm are averaged as
well. The average is part of the trainer's state. Where processes divide the weights, each averages
its own parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor, distributed, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from slipway.training.distributed.collectives import num_ranks
from slipway.training.distributed.shards import divided_from, divided_like, local, zero_part

AVERAGE_KEY = "WeightAverage"  # key of the callback in the trainer's state
# DeepSpeed's file of everything that is not sharded.
_SHARED_STATE = Path("checkpoint/mp_rank_00_model_states.pt")


class WeightAverage(pl.Callback):
    """average = d * average + (1 - d) * weights after optimizer step n.

    d = min(decay, (1 + n) / (10 + n)): the smaller d of the first steps forgets the initial random
    weights, as in TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._network, self._decay = network, decay
        # float32, by name in the network; this rank's parts from the start of a training on
        self._values: dict[str, Tensor] = {}
        self._num_updates = 0
        # The weights of training, while the average is in their place.
        self._training_weights: dict[str, Tensor] = {}

    @property
    def state_key(self) -> str:
        return AVERAGE_KEY

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights by name, divided over processes as the weights are."""
        like = self._network.state_dict()
        values = {name: divided_from(value, like[name]) for name, value in self._values.items()}
        return {"values": values, "num_updates": self._num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values, self._num_updates = state_dict["values"], state_dict["num_updates"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._values:
            self._values = {name: value.clone() for name, value in self._current(trainer).items()}
        else:  # whole values of a checkpoint
            like = self._network.state_dict()
            weights = dict(self._network.named_parameters())
            self._values = {
                name: zero_part(value, weights[name])
                if _is_partitioned(weights.get(name))
                else local(divided_like(value, like[name]))
                for name, value in self._values.items()
            }
        device = trainer.strategy.root_device
        self._values = {name: value.to(device) for name, value in self._values.items()}
        self._num_updates = self._num_updates or trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self._num_updates:
            return  # gradients were accumulated
        self._num_updates = trainer.global_step
        if pl_module.nonfinite_guard.skipped_last_step:
            return
        decay = min(self._decay, (1 + self._num_updates) / (10 + self._num_updates))
        current = self._current(trainer)
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        values = list(self._values.values())
        # With offload the weights are in the host's memory.
        weights = [current[name].to(value.device) for name, value in self._values.items()]
        average(values, weights, self._num_updates)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        average_running_statistics(self._network)  # those of training, before they are saved
        tensors = _floating_tensors(self._network)
        self._training_weights = {name: value.clone() for name, value in tensors.items()}
        _copy(self._values, tensors)
        _gather_again(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tensors = _floating_tensors(self._network)
        # Validation has replaced the average's running statistics by the mean over all ranks.
        _copy({name: tensors[name] for name in self.buffers()}, self._values)
        _copy(self._training_weights, tensors)
        _gather_again(trainer)
        self._training_weights = {}

    def buffers(self) -> dict[str, Tensor]:
        """Return the averages of BatchNorm's running statistics, which differ between processes."""
        names = [name for name, _ in self._network.named_buffers()]
        return {name: self._values[name] for name in names if name in self._values}

    def replace_weights(self) -> None:
        """Replace the network's weights by their average after the training."""
        _copy(self._values, _floating_tensors(self._network))

    @contextmanager
    def training_weights(self) -> Iterator[None]:
        """Use the training weights in the block, even while a validation uses the average."""
        if not self._training_weights:
            yield
            return
        tensors = _floating_tensors(self._network)
        average = {name: value.clone() for name, value in tensors.items()}
        _copy(self._training_weights, tensors)
        try:
            yield
        finally:
            _copy(average, tensors)

    def _current(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        """Return the training weights in float32, from DeepSpeed's own copy if there is one.

        Every rank has to call it.
        """
        tensors = _floating_tensors(self._network)
        is_float32 = next(self._network.parameters()).dtype == torch.float32
        if is_float32 or not isinstance(trainer.strategy, DeepSpeedStrategy):
            return tensors
        from deepspeed.utils import safe_get_full_fp32_param

        get = _master_part if trainer.strategy.zero_stage_3 else safe_get_full_fp32_param
        parameters = self._network.named_parameters()
        return tensors | {name: get(value) for name, value in parameters}


def average_running_statistics(network: nn.Module) -> None:
    """Replace BatchNorm's running means and variances by their mean over all ranks.

    Equal values keep every bit.
    """
    if num_ranks() == 1:
        return
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            for statistics in (module.running_mean, module.running_var):
                assert statistics is not None
                total = statistics.double()
                distributed.all_reduce(total)
                statistics.copy_(total / num_ranks())


def averaged_weights(state: Path) -> dict[str, Tensor]:
    """Return the average from a verified trainer state, by name in the network; {} without one."""
    path = state / _SHARED_STATE if state.is_dir() else state
    if not path.exists():
        return _merged_parts(state)
    return _average_in(torch.load(path, map_location="cpu", mmap=True, weights_only=True))


def _merged_parts(state: Path) -> dict[str, Tensor]:
    """Merge the average of ZeRO-3, of which each process has saved its own parts."""
    from deepspeed.utils.zero_to_fp32 import get_model_state_files

    ranks = [
        torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        for path in get_model_state_files(str(state / _SHARED_STATE.parent))
    ]
    parts = [_average_in(rank) for rank in ranks]
    shapes: dict[str, torch.Size] = {}
    for group in [*ranks[0]["param_shapes"], ranks[0].get("frozen_param_shapes") or {}]:
        shapes |= {name.removeprefix("network."): shape for name, shape in group.items()}
    merged = {
        name: torch.cat([part[name] for part in parts])[: shape.numel()].reshape(shape)
        for name, shape in shapes.items()
        if name in parts[0]
    }
    return parts[0] | merged  # buffers are whole


def _average_in(content: dict[str, Any]) -> dict[str, Tensor]:
    values: dict[str, Tensor] = content["callbacks"].get(AVERAGE_KEY, {}).get("values", {})
    return values


def _floating_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return this rank's parts of floating-point parameters and saved buffers.

    A part of ZeRO-3 is flat.
    """
    state = network.state_dict()
    tensors = {name: local(value) for name, value in state.items() if value.is_floating_point()}
    weights: Iterator[tuple[str, Any]] = network.named_parameters()
    return tensors | {name: each.ds_tensor for name, each in weights if _is_partitioned(each)}


def _is_partitioned(weight: nn.Parameter | None) -> bool:
    """Return True if ZeRO-3 has divided `weight`."""
    return hasattr(weight, "ds_tensor")


def _master_part(weight: Any) -> Tensor:
    """Return this rank's float32 part of a weight of ZeRO-3, flat."""
    from deepspeed.utils import safe_get_local_fp32_param

    if not hasattr(weight, "_z3_optimizer"):  # frozen for the whole training
        part: Tensor = weight.ds_tensor.float()
        return part
    requires_grad = weight.requires_grad
    weight.requires_grad_(True)  # DeepSpeed returns nothing for a frozen weight
    part = safe_get_local_fp32_param(weight)
    weight.requires_grad_(requires_grad)
    return part


def _gather_again(trainer: pl.Trainer) -> None:
    """Release whole weights that ZeRO-3 has gathered, because their parts have changed."""
    strategy = trainer.strategy
    if isinstance(strategy, DeepSpeedStrategy) and strategy.zero_stage_3:
        strategy.deepspeed_engine.optimizer.parameter_offload.partition_all_parameters()


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, value in source.items():
        target[name].copy_(value)
