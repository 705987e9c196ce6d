"""Where and how a training runs: what `auto` means here, what is refused, and what really ran.

What is asked for by name is done or refused, never replaced. After the trainer has set itself up,
`actual_setup` reads from it what came out, and a difference ends the run.
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
from torch import Tensor

from slipway.config.sections import Offload, TrainParams
from slipway.system.errors import ParamsError, TrainingError, UnavailableError
from slipway.training.distributed.launchers import Launch, cluster_environment, find_launch
from slipway.training.networks.networks import TrainingSetup

PrecisionName = Literal["16-mixed", "bf16-mixed", "32-true"]
_DTYPES = {"16-mixed": "float16", "bf16-mixed": "bfloat16", "32-true": "float32"}


@dataclass(frozen=True)
class Machine:
    """What there is to train on."""

    num_gpus: int
    has_bfloat16: bool  # the GPUs compute in it, or there are none and the CPU does
    launch: Launch | None  # None where Lightning starts the processes


@dataclass(frozen=True)
class Placement:
    """A decided way of training: nothing is left to "auto"."""

    strategy: str
    precision: PrecisionName
    accelerator: str
    devices: int  # processes per node
    num_nodes: int
    offload: Offload
    launch: Launch | None
    reasons: tuple[str, ...]  # why "auto" became what it became

    @property
    def world_size(self) -> int:
        """Processes over all nodes."""
        return self.devices * self.num_nodes

    @property
    def zero_stage(self) -> int | None:
        """1, 2 or 3 with DeepSpeed."""
        return int(self.strategy[-1]) if self.strategy.startswith("deepspeed") else None

    @property
    def half_dtype(self) -> torch.dtype | None:
        """The dtype that DeepSpeed casts parameters to, if it does. DDP and single keep them in float32."""
        if self.zero_stage is None or self.precision == "32-true":
            return None
        return torch.float16 if self.precision == "16-mixed" else torch.bfloat16

    @property
    def expected(self) -> TrainingSetup:
        """What `actual_setup` has to find."""
        return TrainingSetup(
            strategy=self.strategy,
            precision=self.precision,
            accelerator=self.accelerator,
            world_size=self.world_size,
            zero_stage=self.zero_stage,
            offload=self.offload,
            parameter_dtype=_DTYPES[self.precision] if self.zero_stage else "float32",
        )


def this_machine() -> Machine:
    """What this process finds."""
    num_gpus = torch.cuda.device_count()
    return Machine(
        num_gpus=num_gpus,
        has_bfloat16=num_gpus == 0 or torch.cuda.is_bf16_supported(including_emulation=False),
        launch=find_launch(),
    )


def requested_setup(params: TrainParams) -> TrainingSetup:
    """What `params` ask for, "auto" included."""
    devices = params.devices
    return TrainingSetup(
        strategy=params.strategy,
        precision=params.precision,
        accelerator=params.accelerator,
        world_size="auto" if devices == "auto" else devices * params.num_nodes,
        zero_stage=None,
        offload=params.offload,
        parameter_dtype=None,
    )


def place(params: TrainParams, machine: Machine) -> Placement:
    """Decide where "auto" leaves it open. UnavailableError or ParamsError where what is asked for cannot be had."""
    reasons: list[str] = []
    _check_num_nodes(params.num_nodes, machine.launch)
    accelerator = _accelerator(params, machine, reasons)
    devices = _devices(params, machine, accelerator, reasons)
    strategy = _strategy(params, accelerator, devices, reasons)
    precision = _precision(params, machine, accelerator, strategy, reasons)
    return Placement(
        strategy,
        precision,
        accelerator,
        devices,
        params.num_nodes,
        params.offload,
        machine.launch,
        tuple(reasons),
    )


def _check_num_nodes(num_nodes: int, launch: Launch | None) -> None:
    if launch is None and num_nodes > 1:
        raise ParamsError(
            f"train.num_nodes is {num_nodes}, but this process was started alone, on one node. "
            "Start it with Slurm, torchrun, mpirun or the DeepSpeed launcher: docs/scaling.md. Or set it to 1."
        )
    if launch and launch.num_nodes != num_nodes:
        nodes = f"{launch.num_nodes} node{'s' * (launch.num_nodes > 1)}"
        raise ParamsError(
            f"train.num_nodes is {num_nodes}, but {launch.launcher} started processes on {nodes}. Make them equal."
        )


def _accelerator(params: TrainParams, machine: Machine, reasons: list[str]) -> str:
    if params.accelerator == "gpu" and machine.num_gpus == 0:
        raise UnavailableError(
            "train.accelerator is 'gpu', but torch finds no GPU here. Use 'cpu' or 'auto', or mend the driver."
        )
    if params.accelerator != "auto":
        return params.accelerator
    found = "gpu" if machine.num_gpus else "cpu"
    reasons.append(
        f"accelerator {found}: {machine.num_gpus or 'no'} GPU{'s' * (machine.num_gpus > 1)} found"
    )
    return found


def _devices(params: TrainParams, machine: Machine, accelerator: str, reasons: list[str]) -> int:
    asked, launch = params.devices, machine.launch
    if launch and asked not in ("auto", launch.num_local):
        processes = f"{launch.num_local} process{'es' * (launch.num_local > 1)}"
        raise ParamsError(
            f"train.devices is {asked}, but {launch.launcher} started {processes} on this node. Make them equal, or use 'auto'."
        )
    if asked == "auto":
        single = params.strategy == "single"
        available = machine.num_gpus if accelerator == "gpu" and not single else 1
        devices = launch.num_local if launch else available
        reasons.append(f"devices {devices}: {_why_devices(launch, accelerator, single)}")
    else:
        devices = asked
    if accelerator == "gpu" and devices > machine.num_gpus:
        raise UnavailableError(
            f"{devices} GPUs per node are asked for (train.devices), but there are {machine.num_gpus}."
        )
    return devices


def _why_devices(launch: Launch | None, accelerator: str, single: bool) -> str:
    if launch:
        return f"{launch.launcher} started that many processes on this node"
    if single:
        return "strategy 'single' is one process"
    return "every GPU" if accelerator == "gpu" else "one process uses every core"


def _strategy(params: TrainParams, accelerator: str, devices: int, reasons: list[str]) -> str:
    world_size = devices * params.num_nodes
    if params.strategy == "single" and world_size > 1:
        raise ParamsError(
            f"train.strategy is 'single', but train.devices and train.num_nodes make {world_size} processes. "
            "Use 'ddp' or a deepspeed strategy, or one device on one node."
        )
    if params.strategy != "auto":
        return params.strategy
    if accelerator == "gpu":
        reasons.append("strategy deepspeed_stage_2: there is a GPU")
        return "deepspeed_stage_2"
    strategy = "single" if world_size == 1 else "ddp"
    reasons.append(f"strategy {strategy}: {world_size} process{'es' * (world_size > 1)} on the CPU")
    return strategy


def _precision(
    params: TrainParams, machine: Machine, accelerator: str, strategy: str, reasons: list[str]
) -> PrecisionName:
    if params.precision == "auto":
        precision: PrecisionName = "16-mixed" if accelerator == "gpu" else "32-true"
        reasons.append(f"precision {precision}: training on the {accelerator}")
        return precision
    if (
        params.precision == "16-mixed"
        and accelerator == "cpu"
        and not strategy.startswith("deepspeed")
    ):
        raise UnavailableError(
            f"train.precision is '16-mixed', which strategy {strategy!r} cannot do on the CPU (torch has no fp16 autocast with loss "
            "scaling there). Use 'bf16-mixed' or '32-true', or a deepspeed strategy."
        )
    if params.precision == "bf16-mixed" and accelerator == "gpu" and not machine.has_bfloat16:
        raise UnavailableError(
            "train.precision is 'bf16-mixed', but this GPU does not compute in bfloat16. Use '16-mixed' or '32-true'."
        )
    return params.precision


class PortableDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, which also runs on the CPU, over gloo. On CUDA nothing is changed.

    Lightning 2.6 refuses the CPU in `setup_environment` and `setup_distributed`; the overrides go when it does not.
    """

    @property
    def root_device(self) -> torch.device:
        """DeepSpeed compares the device's index, which a plain CPU device lacks."""
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        """Skips the refusal of anything but CUDA."""
        if isinstance(self.accelerator, CPUAccelerator):
            os.environ["DS_ACCELERATOR"] = "cpu"
            DDPStrategy.setup_environment(self)
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        """Skips the check of CUDA device numbers."""
        if isinstance(self.accelerator, CPUAccelerator):
            import deepspeed.ops

            # It would be compiled into the user's home at the first start; gloo does the same without a compiler.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()
        else:
            super().setup_distributed()


class _DeepSpeedPrecision(DeepSpeedPrecision):
    """Leaves batches alone, and divides the loss by the number of accumulated batches once."""

    def convert_input(self, data: Any) -> Any:
        """Lightning would cast sampling matrices and numeric targets to half precision."""
        return data

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Lightning 2.6 has divided the loss by then, and DeepSpeed 0.19 would again: gradients too small, hardly ever clipped."""
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)


def trainer_arguments(
    placement: Placement, per_device_batch: int, *, freezes: bool = False
) -> dict[str, Any]:
    """The arguments of `pl.Trainer` that a placement decides; `freezes` where some parameters get no gradient in some epochs."""
    arguments: dict[str, Any] = {
        "accelerator": placement.accelerator,
        "devices": placement.devices,
        "num_nodes": placement.num_nodes,
        "plugins": [cluster_environment(placement.launch)],
    }
    if placement.zero_stage is None:
        # Without `broadcast_buffers` every rank has running statistics of its own, to be averaged after the epoch;
        # with it the shares of all but rank 0 would be thrown away before each step.
        strategy = (
            DDPStrategy(broadcast_buffers=False, find_unused_parameters=freezes)
            if placement.strategy == "ddp"
            else "auto"
        )
        return {**arguments, "strategy": strategy, "precision": placement.precision}
    if placement.accelerator == "cpu":
        os.environ["DS_ACCELERATOR"] = (
            "cpu"  # read when deepspeed is imported, which the strategy does
        )
    strategy = PortableDeepSpeedStrategy(
        stage=placement.zero_stage,
        logging_batch_size_per_gpu=per_device_batch,
        offload_optimizer=placement.offload != "none",
        offload_parameters=placement.offload == "optimizer_and_parameters",
        pin_memory=placement.accelerator
        == "gpu",  # twice as fast to copy from, and never swapped out
    )
    # DeepSpeed would insist on an Adam of its own, which it compiles at the first start; torch's fused one needs no compiler.
    strategy.config = {**(strategy.config or {}), "zero_force_ds_cpu_optimizer": False}
    return {
        **arguments,
        "strategy": strategy,
        "plugins": [*arguments["plugins"], _DeepSpeedPrecision(placement.precision)],
    }


def actual_setup(trainer: pl.Trainer) -> TrainingSetup:
    """What a trainer that has set itself up really does."""
    strategy = trainer.strategy
    stage = (
        strategy.deepspeed_engine.zero_optimization_stage()
        if isinstance(strategy, DeepSpeedStrategy)
        else None
    )
    model = (
        strategy.deepspeed_engine.module
        if isinstance(strategy, DeepSpeedStrategy)
        else trainer.lightning_module
    )
    return TrainingSetup(
        strategy=_name(strategy, stage),
        precision=_actual_precision(strategy),
        accelerator="gpu" if strategy.root_device.type == "cuda" else strategy.root_device.type,
        world_size=trainer.world_size,
        zero_stage=stage,
        offload=_actual_offload(strategy),
        parameter_dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
    )


def check_actual(expected: TrainingSetup, actual: TrainingSetup) -> None:
    """TrainingError naming every field in which they differ."""
    found, wanted = actual.model_dump(), expected.model_dump()
    differing = [
        f"  {key}: requested {wanted[key]}, actual {found[key]}"
        for key in wanted
        if wanted[key] != found[key]
    ]
    if differing:
        raise TrainingError(
            "the training does not run as requested:\n"
            + "\n".join(differing)
            + "\nSee docs/training.md."
        )


def _name(strategy: Strategy, stage: int | None) -> str:
    if stage is not None:
        return f"deepspeed_stage_{stage}"
    if isinstance(strategy, DDPStrategy):
        return "ddp"
    return "single" if isinstance(strategy, SingleDeviceStrategy) else type(strategy).__name__


def _actual_offload(strategy: Strategy) -> str:
    """From the optimizer that ZeRO made, and from where its float32 masters lie."""
    if not isinstance(strategy, DeepSpeedStrategy):
        return "none"
    zero = strategy.deepspeed_engine.optimizer
    if strategy.zero_stage_3:
        optimizer, parameters, masters = (
            zero.offload_optimizer,
            zero.offload_param,
            zero.fp32_partitioned_groups_flat,
        )
    else:
        optimizer, parameters, masters = (
            zero.cpu_offload,
            False,
            zero.single_partition_of_fp32_groups,
        )
    if optimizer and any(master.device.type != "cpu" for master in masters):
        return f"none: the optimizer's masters are on {masters[0].device}"
    names = {
        (False, False): "none",
        (True, False): "optimizer",
        (True, True): "optimizer_and_parameters",
    }
    return names.get((optimizer, parameters), "parameters")


def _actual_precision(strategy: Strategy) -> str:
    if isinstance(strategy, DeepSpeedStrategy):
        engine = strategy.deepspeed_engine
        return (
            "16-mixed"
            if engine.fp16_enabled()
            else "bf16-mixed"
            if engine.bfloat16_enabled()
            else "32-true"
        )
    plugin = strategy.precision_plugin
    if isinstance(plugin, MixedPrecision):
        return str(plugin.precision)
    return "32-true" if type(plugin) is Precision else type(plugin).__name__
