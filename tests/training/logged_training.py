"""`python -m tests.training.logged_training`: trains and prints if each step changed anything.

With BAD_GRADIENT=STEP:RANK the gradient of that rank is NaN in that step (counted from 1), while
its loss stays finite.
"""

import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor

from slipway.config.stage_run import run_stage
from slipway.training.distributed.shards import local
from slipway.training.module import TrainingModule
from stages import train

BAD_STEP, BAD_RANK = map(int, os.environ.get("BAD_GRADIENT", "0:0").split(":"))


def lasting(module: TrainingModule) -> Iterator[Tensor]:
    """Return everything that a step may change: weights, running statistics, optimizer state."""
    strategy = module.trainer.strategy
    if not isinstance(strategy, DeepSpeedStrategy):
        yield from module.network.state_dict().values()
        yield from _moments(strategy.optimizers[0])
        return
    sharing: Any = strategy.deepspeed_engine.optimizer
    yield from module.network.buffers()
    if strategy.deepspeed_engine.zero_optimization_stage() == 3:
        yield from [*sharing.fp16_partitioned_groups_flat, *sharing.fp32_partitioned_groups_flat]
    else:
        yield from module.network.parameters()
        yield from sharing.single_partition_of_fp32_groups
    yield from _moments(sharing.optimizer)


def _moments(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def digest(module: TrainingModule) -> str:
    found = hashlib.sha256()
    for value in lasting(module):
        found.update(
            local(value.detach()).contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


class WatchedModule(TrainingModule):
    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        if not self.nonfinite_guard._batches:
            self._before = digest(self)
        loss = super().training_step(batch, batch_index)
        is_bad = (self.global_step + 1, self.global_rank) == (BAD_STEP, BAD_RANK)
        return NanBackward.apply(loss) if is_bad else loss

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        super().optimizer_step(*arguments, **named)
        if not self.nonfinite_guard._batches:
            change = "nothing" if digest(self) == self._before else "something"
            print(
                f"step {self.global_step + 1} changed {change} on rank {self.global_rank}",
                flush=True,
            )


if __name__ == "__main__":
    import slipway.training.assembly

    setattr(slipway.training.assembly, "TrainingModule", WatchedModule)  # noqa: B010
    run_stage(train.run)
