"""Strategy, precision and devices that a training requests, with every "auto" resolved.

A setting other than "auto" is used or refused, never replaced.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from slipway.artifacts.training_setup import TrainingSetup
from slipway.config.training import SHARING, Offload, TrainParams
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.distributed.launchers import Launch, find_launch

PrecisionName = Literal["16-mixed", "bf16-mixed", "32-true"]
_DIVIDING = ("fsdp", *SHARING)  # strategies without a loss scale
# Names of the dtypes in torch.
DTYPES = {"16-mixed": "float16", "bf16-mixed": "bfloat16", "32-true": "float32"}


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
    offload_path: str | None = None  # folder of the offloaded optimizer state

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
        return self.strategy in SHARING or self.model_parallel is not None

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
        return self.gathers_weights or self.strategy in SHARING

    @property
    def gathers_weights(self) -> bool:
        """True if a process gathers the weights of a layer from all others before it computes."""
        return self.zero_stage == 3 or self.strategy == "fsdp"

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
            parameter_dtype=DTYPES[self.precision] if self.is_sharded else "float32",
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
        params.offload_path,
    )


def _model_parallel(params: TrainParams, strategy: str, world_size: int) -> int | None:
    """Return the number of processes that share a copy of the network.

    None if the strategy does not divide the network among them.
    """
    if strategy not in SHARING and not params.model_parallel:
        return None
    size = params.model_parallel or world_size
    if world_size % size:
        raise ParamsError(
            f"train.model_parallel is {size}, but train.devices and train.num_nodes make "
            f"{world_size} processes, expected a multiple of {size}. Change their number, or set "
            f"train.model_parallel to a divisor of {world_size}, or to null."
        )
    if strategy == "fsdp" and size == world_size:
        raise ParamsError(
            f"train.model_parallel is {size}, the number of all processes, so strategy 'fsdp' has "
            "no copies to divide weights over. Use strategy 'tensor_parallel', or model_parallel: "
            "null."
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
