"""`python -m tests.training.typed_training`: trains, and prints each rank's dtypes in step 1."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

import slipway.training.assembly
from slipway.config.stage_run import run_stage
from slipway.training.module import TrainingModule
from stages import train


class TypedModule(TrainingModule):
    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        if self.global_step:
            return super().training_step(batch, batch_index)
        computed: set[torch.dtype] = set()
        layers = [
            layer for layer in self.network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)
        ]
        hooks = [
            layer.register_forward_hook(lambda _, inputs, output: computed.add(output.dtype))
            for layer in layers
        ]
        loss = super().training_step(batch, batch_index)
        for hook in hooks:
            hook.remove()
        weights = {parameter.dtype for parameter in self.network.parameters()}
        print(
            f"typed rank {self.global_rank}: computed {computed}, weights {weights}, "
            f"loss {loss.dtype}",
            flush=True,
        )
        return loss


if __name__ == "__main__":
    setattr(slipway.training.assembly, "TrainingModule", TypedModule)  # noqa: B010
    sys.argv[0] = __file__
    run_stage(train.run)
