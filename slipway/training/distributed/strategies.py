"""Strategy, precision and devices of a training: resolves "auto", and checks the actual setup.

A setting other than "auto" is used or refused, never replaced. Before the first step,
`actual_setup` reads from the trainer which setup really runs; a difference ends the run.
"""

import os
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.plugins.precision import DeepSpeedPrecision, Precision
from pytorch_lightning.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn

from slipway.config.sections import Offload, TrainParams
from slipway.system.errors import ParamsError, TrainingError, UnavailableError
from slipway.training.distributed.divided import DividedStrategy, SharedCopyStrategy
from slipway.training.distributed.fully_sharded import FullyShardedStrategy, ShardedPrecision
from slipway.training.distributed.launchers import Launch, cluster_environment, find_launch
from slipway.training.distributed.pipeline import PipelineStrategy
from slipway.training.distributed.tensor_parallel import TensorParallelStrategy
from slipway.training.networks.mapped_weights import MappedWeights
from slipway.training.networks.networks import Network, TrainingSetup

PrecisionName = Literal["16-mixed", "bf16-mixed", "32-true"]
_SHARING = ("tensor_parallel", "pipeline")  # processes of a copy of the network, and its rows
_DIVIDING = ("fsdp", *_SHARING)  # strategies without a loss scale
_DTYPES = {"16-mixed": "float16", "bf16-mixed": "bfloat16", "32-true": "float32"}


@dataclass(frozen=True)
class TrainingHost:
    """The hardware of this node and the launcher of this process."""

    num_gpus: int
    has_bfloat16: bool  # True without a GPU, because the CPU computes in it
    launch: Launch | None  # None if Lightning starts the processes


@dataclass(frozen=True)
class Placement:
    """Strategy, precision and devices of a training, with every "auto" resolved."""

    strategy: str
    precision: PrecisionName
    accelerator: str
    devices: int  # processes per node
    num_nodes: int
    offload: Offload | None
    launch: Launch | None
    reasons: tuple[str, ...]  # why each "auto" became its value
    # Processes with consecutive ranks that share a copy of the network; None if none do.
    model_parallel: int | None = None

    def __str__(self) -> str:
        copies = ""
        if self.num_readers > 1 and self.model_parallel:
            copies = f" in {self.num_readers} copies of the network"
        processes = f"{self.world_size} on {self.accelerator}{copies}"
        return f"{self.strategy}, {self.precision}, {processes}"

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes

    @property
    def shares_rows(self) -> bool:
        """True if processes compute the same rows, each with a part of a copy of the network."""
        return self.strategy in _SHARING

    @property
    def num_readers(self) -> int:
        """The number of processes that compute different rows."""
        return self.world_size // (self.model_parallel or 1)

    def reader(self, rank: int) -> int:
        """Return the index of the rows that `rank` reads, in [0, num_readers)."""
        return rank // (self.model_parallel or 1)

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage of DeepSpeed, 1 to 3; None for other strategies."""
        return int(self.strategy[-1]) if self.strategy.startswith("deepspeed") else None

    @property
    def is_sharded(self) -> bool:
        """True for DeepSpeed and FSDP, which store weights as parts in a dtype of their own."""
        return self.zero_stage is not None or self.strategy == "fsdp"

    @property
    def divides_weights(self) -> bool:
        """True if each process holds only a part of the weights."""
        return self.zero_stage == 3 or self.strategy in _DIVIDING

    @property
    def half_dtype(self) -> torch.dtype | None:
        """The dtype in which DeepSpeed or FSDP compute; None for DDP and a single process."""
        if not self.is_sharded or self.precision == "32-true":
            return None
        return torch.float16 if self.precision == "16-mixed" else torch.bfloat16

    @property
    def expected(self) -> TrainingSetup:
        """The setup that `actual_setup` must find."""
        return TrainingSetup(
            strategy=self.strategy,
            precision=self.precision,
            accelerator=self.accelerator,
            world_size=self.world_size,
            zero_stage=self.zero_stage,
            offload=self.offload,
            parameter_dtype=_DTYPES[self.precision] if self.is_sharded else "float32",
            model_parallel=self.model_parallel,
        )


def this_host() -> TrainingHost:
    num_gpus = torch.cuda.device_count()
    return TrainingHost(
        num_gpus=num_gpus,
        has_bfloat16=num_gpus == 0 or torch.cuda.is_bf16_supported(including_emulation=False),
        launch=find_launch(),
    )


def requested_setup(params: TrainParams) -> TrainingSetup:
    """Return the setup that `params` request; "auto" stays "auto"."""
    devices = params.devices
    return TrainingSetup(
        strategy=params.strategy,
        precision=params.precision,
        accelerator=params.accelerator,
        world_size="auto" if devices == "auto" else devices * params.num_nodes,
        zero_stage=None,
        offload=params.offload,
        parameter_dtype=None,
        model_parallel=params.model_parallel,
    )


def place(params: TrainParams, host: TrainingHost) -> Placement:
    """Resolve every "auto" in `params` for the hardware of `host`.

    Raises UnavailableError or ParamsError if an explicit setting is impossible.
    """
    reasons: list[str] = []
    _check_num_nodes(params.num_nodes, host.launch)
    accelerator = _accelerator(params, host, reasons)
    devices = _devices(params, host, accelerator, reasons)
    strategy = _strategy(params, accelerator, devices, reasons)
    precision = _precision(params, host, accelerator, strategy, reasons)
    return Placement(
        strategy,
        precision,
        accelerator,
        devices,
        params.num_nodes,
        params.offload,
        host.launch,
        tuple(reasons),
        _model_parallel(params, strategy, devices * params.num_nodes),
    )


def _model_parallel(params: TrainParams, strategy: str, world_size: int) -> int | None:
    """Return the number of processes that share a copy of the network.

    None if the strategy does not divide the network among them.
    """
    if strategy not in _SHARING:
        return None
    size = params.model_parallel or world_size
    if world_size % size:
        raise ParamsError(
            f"train.model_parallel is {size}, but train.devices and train.num_nodes make "
            f"{world_size} processes, expected a multiple of {size}. Change their number, or set "
            f"train.model_parallel to a divisor of {world_size}, or to null: all processes share "
            "one copy."
        )
    return size


def _check_num_nodes(num_nodes: int, launch: Launch | None) -> None:
    if launch is None and num_nodes > 1:
        raise ParamsError(
            f"train.num_nodes is {num_nodes}, but no launcher started this process, so it runs on "
            "one node. Start it with Slurm, torchrun, mpirun or the DeepSpeed launcher: "
            "docs/how-to/scaling.md. Or set it to 1."
        )
    if launch and launch.num_nodes != num_nodes:
        nodes = f"{launch.num_nodes} node{'s' * (launch.num_nodes > 1)}"
        raise ParamsError(
            f"train.num_nodes is {num_nodes}, but {launch.launcher} started processes on {nodes}. "
            "Make them equal."
        )


def _accelerator(params: TrainParams, host: TrainingHost, reasons: list[str]) -> str:
    if params.accelerator == "gpu" and host.num_gpus == 0:
        raise UnavailableError(
            "train.accelerator is 'gpu', but torch finds no GPU here. Use 'cpu' or 'auto', or "
            "repair the driver."
        )
    if params.accelerator != "auto":
        return params.accelerator
    found = "gpu" if host.num_gpus else "cpu"
    gpus = f"{host.num_gpus or 'no'} GPU{'s' * (host.num_gpus > 1)}"
    reasons.append(f"accelerator {found}: {gpus} found")
    return found


def _devices(params: TrainParams, host: TrainingHost, accelerator: str, reasons: list[str]) -> int:
    requested, launch = params.devices, host.launch
    if launch and requested not in ("auto", launch.num_local):
        processes = f"{launch.num_local} process{'es' * (launch.num_local > 1)}"
        raise ParamsError(
            f"train.devices is {requested}, but {launch.launcher} started {processes} on this "
            "node. Make them equal, or use 'auto'."
        )
    if requested == "auto":
        devices, reason = _auto_devices(params, host, accelerator)
        reasons.append(f"devices {devices}: {reason}")
    else:
        devices = requested
    if accelerator == "gpu" and devices > host.num_gpus:
        raise UnavailableError(
            f"train.devices needs {devices} GPUs per node, but there are {host.num_gpus}."
        )
    return devices


def _auto_devices(params: TrainParams, host: TrainingHost, accelerator: str) -> tuple[int, str]:
    if host.launch:
        reason = f"{host.launch.launcher} started that many processes on this node"
        return host.launch.num_local, reason
    if params.strategy == "single":
        return 1, "strategy 'single' is one process"
    if accelerator == "gpu":
        return host.num_gpus, "every GPU"
    return 1, "one process uses every core"


def _strategy(params: TrainParams, accelerator: str, devices: int, reasons: list[str]) -> str:
    world_size = devices * params.num_nodes
    if params.strategy == "single" and world_size > 1:
        raise ParamsError(
            "train.strategy is 'single', but train.devices and train.num_nodes make "
            f"{world_size} processes. Use another strategy, or one device on one node."
        )
    if params.strategy != "auto":
        return params.strategy
    if accelerator == "gpu" and world_size == 1:
        reasons.append("strategy single: on one GPU, ZeRO has nothing to shard")
        return "single"
    if accelerator == "gpu":
        reasons.append(f"strategy deepspeed_stage_2: {world_size} GPUs share the state")
        return "deepspeed_stage_2"
    strategy = "single" if world_size == 1 else "ddp"
    reasons.append(f"strategy {strategy}: {world_size} process{'es' * (world_size > 1)} on the CPU")
    return strategy


def _precision(
    params: TrainParams, host: TrainingHost, accelerator: str, strategy: str, reasons: list[str]
) -> PrecisionName:
    if params.precision == "auto":
        return auto_precision(host, accelerator, strategy, reasons)
    if params.precision == "16-mixed" and strategy in _DIVIDING:
        raise UnavailableError(
            f"train.precision is '16-mixed', but strategy {strategy!r} has no loss scaling, "
            "without which small gradients vanish in fp16. Use 'bf16-mixed' or '32-true', or a "
            "deepspeed strategy."
        )
    is_deepspeed = strategy.startswith("deepspeed")
    if params.precision == "16-mixed" and accelerator == "cpu" and not is_deepspeed:
        raise UnavailableError(
            f"train.precision is '16-mixed', which strategy {strategy!r} cannot do on the CPU "
            "(torch has no fp16 autocast with loss scaling there). Use 'bf16-mixed' or '32-true', "
            "or a deepspeed strategy."
        )
    if params.precision == "bf16-mixed" and accelerator == "gpu" and not host.has_bfloat16:
        raise UnavailableError(
            "train.precision is 'bf16-mixed', but this GPU does not compute in bfloat16. "
            "Use '16-mixed' or '32-true'."
        )
    return params.precision


def auto_precision(
    host: TrainingHost, accelerator: str, strategy: str, reasons: list[str]
) -> PrecisionName:
    """Return the precision for "auto", and append the reason to `reasons`."""
    if accelerator == "cpu":
        reasons.append("precision 32-true: training on the cpu")
        return "32-true"
    if strategy in ("single", *_DIVIDING) and host.has_bfloat16:
        reasons.append("precision bf16-mixed: this GPU computes in it, and it needs no loss scale")
        return "bf16-mixed"
    if strategy in _DIVIDING:
        reasons.append(f"precision 32-true: {strategy} has no loss scale, and this GPU no bfloat16")
        return "32-true"
    reasons.append("precision 16-mixed: training on the gpu")
    return "16-mixed"


class PortableDeepSpeedStrategy(DeepSpeedStrategy):
    """Runs Lightning's DeepSpeed strategy on the CPU, too, over gloo.

    On CUDA it behaves like the original. Lightning 2.6 refuses the CPU in `setup_environment` and
    `setup_distributed`; the overrides can be removed once it no longer does.
    """

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
        """Divide the weights one at a time; DeepSpeed would first move all of them to the device.

        Runs after the optimizer is made, which needs the shapes of whole weights.
        """
        assert self.lightning_module is not None
        network = self.lightning_module.network
        assert isinstance(network, Network)
        if self.zero_stage_3 and network.mapped:
            self._divide(network, network.mapped)
            # DeepSpeed moves no part of a model whose weights are divided already.
            for buffer in model.buffers():
                buffer.data = buffer.data.to(self.root_device)
        return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)

    def _divide(self, network: Network, mapped: MappedWeights) -> None:
        from deepspeed import zero

        plugin = self.precision_plugin
        assert isinstance(plugin, _DeepSpeedPrecision)
        dtype = getattr(torch, _DTYPES[plugin.precision])
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
        arguments["strategy"] = FullyShardedStrategy(placement.world_size, placement.half_dtype)
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
        if placement.strategy == "ddp":
            # `broadcast_buffers` would replace every rank's running statistics by rank 0's before
            # each step. Without it they are averaged after the epoch.
            arguments["strategy"] = DDPStrategy(
                broadcast_buffers=False, find_unused_parameters=freezes
            )
        return arguments
    if placement.accelerator == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when the strategy imports deepspeed
    strategy = PortableDeepSpeedStrategy(
        stage=placement.zero_stage,
        logging_batch_size_per_gpu=per_device_batch,
        offload_optimizer=placement.offload is not None,
        offload_parameters=placement.offload == "optimizer_and_parameters",
        pin_memory=placement.accelerator == "gpu",  # twice as fast to copy, never swapped out
    )
    # DeepSpeed's own Adam is compiled at the first start; torch's fused one needs no compiler.
    strategy.config = {**(strategy.config or {}), "zero_force_ds_cpu_optimizer": False}
    arguments["strategy"] = strategy
    arguments["plugins"].append(_DeepSpeedPrecision(placement.precision))
    return arguments


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
            strategy.model_parallel if isinstance(strategy, SharedCopyStrategy) else None
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
