"""The strategies that the trainer runs, and the check of the setup that really runs.

Before the first step `actual_setup` reads it from the trainer; a difference from the requested
one ends the run.
"""

import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.plugins import MixedPrecision, TorchCheckpointIO
from pytorch_lightning.plugins.precision import DeepSpeedPrecision, Precision
from pytorch_lightning.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.serialization import config as torch_loading

from slipway.artifacts.training_setup import TrainingSetup
from slipway.system.errors import TrainingError
from slipway.training.distributed.divided import DividedStrategy, SharedCopyStrategy
from slipway.training.distributed.fully_sharded import FullyShardedStrategy, ShardedPrecision
from slipway.training.distributed.launchers import cluster_environment
from slipway.training.distributed.pipeline import PipelineStrategy
from slipway.training.distributed.placement import DTYPES, Placement
from slipway.training.distributed.state_on_disk import StateOnDisk
from slipway.training.distributed.tensor_parallel import TensorParallelStrategy
from slipway.training.distributed.zero_sizes import largest_block, zero_sizes
from slipway.training.networks.mapped_weights import MappedWeights
from slipway.training.networks.networks import Network


class PortableDeepSpeedStrategy(DeepSpeedStrategy):
    """Runs Lightning's DeepSpeed strategy on the CPU, too, over gloo.

    It keeps the optimizer's state in the folder `offload_path`, if that is given.

    On CUDA it behaves like the original. Lightning 2.6 refuses the CPU in `setup_environment` and
    `setup_distributed`; the overrides can be removed once it no longer does.
    """

    offload_path: str | None = None

    @property
    def root_device(self) -> torch.device:
        """The device, with an index for the CPU because DeepSpeed compares indices."""
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        if isinstance(self.accelerator, CPUAccelerator):
            os.environ["DS_ACCELERATOR"] = "cpu"
            DDPStrategy.setup_environment(self)
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        if isinstance(self.accelerator, CPUAccelerator):
            import deepspeed.ops

            # DeepSpeed would compile it into the user's home; gloo needs no compiler.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()
        else:
            super().setup_distributed()

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None
    ) -> Any:
        """Divide the weights between the processes, one weight at a time.

        DeepSpeed would first move all of them to the device. Lightning calls this after the
        optimizer is made, because the optimizer needs the shapes of undivided weights.
        """
        assert self.lightning_module is not None
        network = self.lightning_module.network
        assert isinstance(network, Network)
        assert isinstance(self.config, dict)
        sizes = zero_sizes(network.num_parameters, largest_block(network))
        zero = self.config["zero_optimization"]
        zero.update(sizes.settings(zero["stage"]))
        if self.zero_stage_3 and network.mapped:
            self._divide(network, network.mapped)
            # DeepSpeed moves no part of a model whose weights are divided already.
            for buffer in model.buffers():
                buffer.data = buffer.data.to(self.root_device)
        engine, zero_optimizer = super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        if self.offload_path and optimizer is not None:
            weights = engine.optimizer.fp32_partitioned_groups_flat
            StateOnDisk(Path(self.offload_path), weights, optimizer)
        return engine, zero_optimizer

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; with `offload_path` without reading all of it into memory."""
        is_mapped = torch_loading.load.mmap or self.offload_path is not None
        with torch_loading.patch({"load.mmap": is_mapped}):  # type: ignore[attr-defined]
            return super().load_checkpoint(checkpoint_path, weights_only)

    def free(self) -> None:
        """Free all tensors after the training; DeepSpeed 0.19 would hold them to the process's end.

        A list and a cache of its modules refer to the engine.
        """
        zero = self.deepspeed_engine.optimizer
        self.deepspeed_engine.destroy()  # removes hooks and buffers
        for leaf in tree_leaves([vars(zero), vars(zero.optimizer)]):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().resizable():
                leaf.untyped_storage().resize_(0)

    def _divide(self, network: Network, mapped: MappedWeights) -> None:
        from deepspeed import zero

        plugin = self.precision_plugin
        assert isinstance(plugin, _DeepSpeedPrecision)
        dtype = getattr(torch, DTYPES[plugin.precision])
        first: Any = None
        for weight in network.parameters():
            weight.data = weight.data.to(dtype)
            if first is None:
                holder = nn.ParameterList([weight])
                zero.Init(module=holder, config_dict_or_path=self.config, dtype=dtype)
                first = weight
            else:
                first.convert_to_zero_parameters(param_list=[weight])
            mapped.release()
        network.mapped = None


class _DeepSpeedPrecision(DeepSpeedPrecision):
    """Leaves batches unchanged, and divides the loss by the accumulated batches only once."""

    def convert_input(self, data: Any) -> Any:
        """Return the data unchanged; Lightning would cast numeric targets to half precision."""
        return data

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Run the backward pass without dividing the loss, which Lightning 2.6 has divided."""
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)


class _StreamedCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint tensor by tensor; Lightning would copy all of it into memory before."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        torch.save(checkpoint, path)


def trainer_arguments(
    placement: Placement,
    per_device_batch: int,
    *,
    freezes: bool = False,
    num_micro_batches: int = 1,
) -> dict[str, Any]:
    """Return the arguments of `pl.Trainer` that follow from `placement`.

    `freezes` is True if some parameters get no gradient in some epochs. `num_micro_batches` is the
    number of micro-batches per step of a pipeline.
    """
    arguments: dict[str, Any] = {
        "accelerator": placement.accelerator,
        "devices": placement.devices,
        "num_nodes": placement.num_nodes,
        "plugins": [cluster_environment(placement.launch)],
    }
    if placement.strategy == "fsdp":
        arguments["strategy"] = FullyShardedStrategy(
            placement.num_readers, placement.model_parallel, placement.half_dtype
        )
        arguments["plugins"].append(ShardedPrecision())
        arguments["inference_mode"] = False  # its tensors could not be gathered for training again
        return arguments
    if placement.model_parallel:
        sizes = placement.num_readers, placement.model_parallel
        arguments["strategy"] = (
            PipelineStrategy(*sizes, num_micro_batches)
            if placement.strategy == "pipeline"
            else TensorParallelStrategy(*sizes)
        )
        arguments["precision"] = placement.precision
        arguments["inference_mode"] = False  # its tensors could not be used for training again
        return arguments
    if placement.zero_stage is None:
        arguments["precision"] = placement.precision
        arguments["strategy"] = "auto"
        arguments["plugins"].append(_StreamedCheckpoints())
        if placement.strategy == "ddp":
            # `broadcast_buffers` would replace every rank's running statistics by rank 0's before
            # each step. Without it they are averaged after the epoch.
            arguments["strategy"] = DDPStrategy(
                broadcast_buffers=False, find_unused_parameters=freezes
            )
        return arguments
    arguments["strategy"] = _deepspeed_strategy(placement, placement.zero_stage, per_device_batch)
    arguments["plugins"].append(_DeepSpeedPrecision(placement.precision))
    return arguments


def _deepspeed_strategy(
    placement: Placement, zero_stage: int, per_device_batch: int
) -> PortableDeepSpeedStrategy:
    if placement.accelerator == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when the strategy imports deepspeed
    strategy = PortableDeepSpeedStrategy(
        stage=zero_stage,
        logging_batch_size_per_gpu=per_device_batch,
        offload_optimizer=placement.offload is not None,
        offload_parameters=placement.offload == "optimizer_and_parameters",
        pin_memory=placement.accelerator == "gpu",  # twice as fast to copy, never swapped out
    )
    # DeepSpeed's own Adam is compiled at the first start; torch's fused one needs no compiler.
    strategy.config = {**(strategy.config or {}), "zero_force_ds_cpu_optimizer": False}
    strategy.offload_path = placement.offload_path
    return strategy


def actual_setup(trainer: pl.Trainer) -> TrainingSetup:
    """Return the setup with which a trainer really runs, after it has set itself up."""
    strategy = trainer.strategy
    dtype, stage = next(trainer.lightning_module.parameters()).dtype, None
    if isinstance(strategy, FullyShardedStrategy) and strategy.compute_dtype:
        dtype = strategy.compute_dtype
    if isinstance(strategy, DeepSpeedStrategy):
        dtype = next(strategy.deepspeed_engine.module.parameters()).dtype
        stage = strategy.deepspeed_engine.zero_optimization_stage()
    return TrainingSetup(
        strategy=_actual_strategy(strategy, stage),
        precision=_actual_precision(strategy),
        accelerator="gpu" if strategy.root_device.type == "cuda" else strategy.root_device.type,
        world_size=trainer.world_size,
        zero_stage=stage,
        offload=_actual_offload(strategy),
        parameter_dtype=str(dtype).removeprefix("torch."),
        model_parallel=(
            strategy.model_parallel
            if isinstance(strategy, SharedCopyStrategy | FullyShardedStrategy)
            else None
        ),
    )


def _yaml(value: object) -> object:
    return "null" if value is None else value


def check_actual(expected: TrainingSetup, actual: TrainingSetup) -> None:
    """Raise a TrainingError that names every field in which `expected` and `actual` differ."""
    found, wanted = actual.model_dump(), expected.model_dump()
    differing = [
        f"  {key}: requested {_yaml(wanted[key])}, actual {_yaml(found[key])}"
        for key in wanted
        if wanted[key] != found[key]
    ]
    if differing:
        lines = [
            "the training does not run as requested:",
            *differing,
            "See docs/explanation/training.md.",
        ]
        raise TrainingError("\n".join(lines))


_DIVIDED = {
    FullyShardedStrategy: "fsdp",
    TensorParallelStrategy: "tensor_parallel",
    PipelineStrategy: "pipeline",
}


def _actual_strategy(strategy: Strategy, stage: int | None) -> str:
    if stage is not None:
        return f"deepspeed_stage_{stage}"
    if isinstance(strategy, DDPStrategy):
        return "ddp"
    if isinstance(strategy, DividedStrategy):
        name = _DIVIDED[type(strategy)]
        return name if strategy.is_divided else f"{name}, of which a process holds whole weights"
    return "single" if isinstance(strategy, SingleDeviceStrategy) else type(strategy).__name__


def _actual_offload(strategy: Strategy) -> str | None:
    """Return the offload that ZeRO's optimizer and the device of its float32 weights show."""
    if not isinstance(strategy, DeepSpeedStrategy):
        return None
    zero = strategy.deepspeed_engine.optimizer
    if strategy.zero_stage_3:
        optimizer, parameters = zero.offload_optimizer, zero.offload_param
        masters = zero.fp32_partitioned_groups_flat
    else:
        optimizer, parameters = zero.cpu_offload, False
        masters = zero.single_partition_of_fp32_groups
    if optimizer and any(master.device.type != "cpu" for master in masters):
        return f"null: the optimizer's masters are on {masters[0].device}"
    names = {
        (False, False): None,
        (True, False): "optimizer",
        (True, True): "optimizer_and_parameters",
    }
    return names.get((optimizer, parameters), "parameters")


def _actual_precision(strategy: Strategy) -> str:
    if isinstance(strategy, DeepSpeedStrategy):
        if strategy.deepspeed_engine.fp16_enabled():
            return "16-mixed"
        return "bf16-mixed" if strategy.deepspeed_engine.bfloat16_enabled() else "32-true"
    if isinstance(strategy, FullyShardedStrategy):
        return "bf16-mixed" if strategy.compute_dtype == torch.bfloat16 else "32-true"
    plugin = strategy.precision_plugin
    if isinstance(plugin, MixedPrecision):
        return str(plugin.precision)
    return "32-true" if type(plugin) is Precision else type(plugin).__name__
