"""An exponential moving average of the weights, in float32: what is validated, kept and exported in their place.

Training goes on with its own weights, which come back after each validation bit for bit. The running statistics of BatchNorm are
averaged with the weights they belong to. The average is part of the trainer's state. ZeRO-3 is refused by `params`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from slipway.training.running_statistics import average_running_statistics

_STATE = "WeightAverage"  # the callback's name in the trainer's state
_SHARED_STATE = Path(
    "checkpoint/mp_rank_00_model_states.pt"
)  # where DeepSpeed puts what is not sharded


class WeightAverage(pl.Callback):
    """average = d * average + (1 - d) * weights after each optimizer step n, with d = min(decay, (1 + n) / (10 + n)).

    The smaller d of the first steps forgets the random weights of the start (as TensorFlow's ExponentialMovingAverage does).
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._network, self._decay = network, decay
        self._values: dict[str, Tensor] = {}  # float32, by name in the network
        self._num_updates = 0
        self._own: dict[
            str, Tensor
        ] = {}  # the weights of training, while the average is in their place

    @property
    def state_key(self) -> str:
        return _STATE

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._values, "num_updates": self._num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._values, self._num_updates = state_dict["values"], state_dict["num_updates"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        found = self._values or {
            name: value.clone() for name, value in self._current(trainer).items()
        }
        self._values = {name: value.to(device) for name, value in found.items()}
        self._num_updates = self._num_updates or trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == self._num_updates:
            return  # gradients were accumulated
        self._num_updates = trainer.global_step
        if pl_module.guard.just_dropped:
            return
        decay = min(self._decay, (1 + self._num_updates) / (10 + self._num_updates))
        current = self._current(trainer)
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        average(
            list(self._values.values()), [current[name] for name in self._values], self._num_updates
        )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        average_running_statistics(self._network)  # those of training, which stay behind
        tensors = _floating(self._network)
        self._own = {name: value.clone() for name, value in tensors.items()}
        _copy(self._values, tensors)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        tensors = _floating(self._network)
        buffers = {name for name, _ in self._network.named_buffers()}
        # Those of the average are the mean over all ranks now.
        _copy({name: tensors[name] for name in self._values if name in buffers}, self._values)
        _copy(self._own, tensors)
        self._own = {}

    def buffers(self) -> dict[str, Tensor]:
        """The averages of running statistics, which every process has for itself."""
        return {
            name: self._values[name]
            for name, _ in self._network.named_buffers()
            if name in self._values
        }

    def replace_weights(self) -> None:
        """Let the network have the average for good, after its training."""
        _copy(self._values, _floating(self._network))

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Within a validation, the weights of training are in the network while the block runs; elsewhere they are anyway."""
        if not self._own:
            yield
            return
        tensors = _floating(self._network)
        average = {name: value.clone() for name, value in tensors.items()}
        _copy(self._own, tensors)
        try:
            yield
        finally:
            _copy(average, tensors)

    def _current(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        """The weights of training in float32; where DeepSpeed computes in half precision, its masters of them. Collective."""
        if (
            not isinstance(trainer.strategy, DeepSpeedStrategy)
            or next(self._network.parameters()).dtype == torch.float32
        ):
            return _floating(self._network)
        from deepspeed.utils import safe_get_full_fp32_param

        masters = {
            name: safe_get_full_fp32_param(parameter)
            for name, parameter in self._network.named_parameters()
        }
        return {name: masters.get(name, value) for name, value in _floating(self._network).items()}


def averaged_weights(state: Path) -> dict[str, Tensor]:
    """The averages in a verified state of the trainer, by name in the network; none where there are none."""
    path = state / _SHARED_STATE if state.is_dir() else state
    if not path.exists():
        return {}  # ZeRO-3 shards everything, and has no average
    content = torch.load(path, map_location="cpu", weights_only=True)
    values: dict[str, Tensor] = content["callbacks"].get(_STATE, {}).get("values", {})
    return values


def _floating(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a checkpoint holds, but for counters."""
    return {
        name: value for name, value in network.state_dict().items() if value.is_floating_point()
    }


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, value in source.items():
        target[name].copy_(value)
