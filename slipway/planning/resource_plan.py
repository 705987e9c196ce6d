"""Predicts memory, disk and time of a training, and checks them against this machine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from slipway.config.params import Params
from slipway.config.training import TrainParams
from slipway.kinds.registry import kind_of
from slipway.planning.memory_plan import DeviceMemory, Traces, planned_memory, trace_all
from slipway.planning.packages import missing_network, missing_packages
from slipway.planning.plan_checks import (
    Findings,
    check_deepspeed,
    check_disks,
    check_memory,
    check_placement,
    check_workers,
)
from slipway.planning.rehearsal import Rehearsal
from slipway.system.errors import SlipwayError
from slipway.system.memory import free_bytes, own_bytes
from slipway.training.batches.batches import StepShape
from slipway.training.distributed.placement import Placement, TrainingHost
from slipway.training.distributed.state_on_disk import check_offload_path
from slipway.training.frozen_features import frozen_body
from slipway.training.job import (
    Paths,
    TrainingData,
    check_division,
    network_spec,
    open_data,
    step_shape,
)
from slipway.training.networks.frozen_parts import FrozenBody, freeze_body
from slipway.training.networks.networks import Network, NetworkSpec, build_network
from slipway.training.recipe.optimizers import update_of
from slipway.training.telemetry.costs import folder_bytes

# Process memory for each byte of activations on the CPU: kernels and the allocator take more. The
# other tensors are made once, and take no more. See bench/results/memory_plan.md.
CPU_SLACK = 1.25
_TRAINER_BYTES = 90_000_000  # measured: Lightning's loops, TensorBoard and DVCLive
_SCALAR_BYTES = 60  # size of one value in TensorBoard's files
_NUM_SCALARS = 7
_HISTOGRAM_BYTES = 4500  # measured on weights and gradients of the demo
_TIMED_STEPS = 10


class PlannedMemory(NamedTuple):
    """Predicted memory of one training process."""

    traces: Traces
    device: DeviceMemory  # memory of its tensors
    process_bytes: int  # memory of the process on the host; on a CPU this includes the tensors
    base_bytes: int  # part of it that is there before the training: the interpreter, all modules


class PlannedSeconds(NamedTuple):
    """Seconds, from a few real steps without communication."""

    step: float  # time of one optimizer step
    validation: float  # time of one epoch's validation
    features: float = 0.0  # time of the features of a frozen body, before the first epoch


@dataclass
class ResourcePlan:
    """The predictions of a plan; None where the data or settings for one are missing."""

    findings: Findings = field(default_factory=Findings)
    placement: Placement | None = None
    data: TrainingData | None = None
    shape: StepShape | None = None
    network: Network | None = None
    # What a frozen body gives to the head and is stored, or why it is not.
    body: FrozenBody | str | None = None
    memory: PlannedMemory | None = None
    disk: dict[str, int] = field(default_factory=dict)  # bytes
    seconds: PlannedSeconds | None = None

    @property
    def steps_per_epoch(self) -> int | None:
        return self.data.num_train // self.shape.batch_size if self.data and self.shape else None


def make_plan(
    params: Params, paths: Paths, host: TrainingHost, timing_seconds: float
) -> ResourcePlan:
    """Predict the costs of the training, and check them against `host`.

    `timing_seconds` limits the time that real steps may take; with 0 no step runs and the plan
    predicts no time.
    """
    train, plan = params.train, ResourcePlan()
    base_bytes = own_bytes()  # this process has the trainer's modules, as a training process
    plan.placement = check_placement(train, host, plan.findings)
    plan.data = _data(paths, plan.findings)
    plan.findings.mismatches += missing_packages(params)
    plan.network = None if missing_network(train) else _network(params, plan)
    if plan.placement:
        check_deepspeed(plan.placement, plan.findings)
        plan.shape = _shape(train, plan.placement, plan.data, plan.findings)
    if not (plan.network and plan.shape and plan.placement):
        return plan
    is_pipeline = plan.placement.strategy == "pipeline"
    try:
        check_offload_path(train.offload_path)
        check_division(plan.network, plan.placement)
    except SlipwayError as error:
        plan.findings.mismatches.append(str(error))
        is_pipeline = False
    traces = trace_all(
        plan.network,
        train,
        plan.shape.per_device,
        accumulates=plan.shape.num_accumulated > 1,
        update=update_of(plan.placement),
        model_parallel=plan.placement.model_parallel or 1,
        num_micro_batches=plan.shape.num_micro_batches if is_pipeline else 0,
    )
    process = process_bytes(traces, plan.placement, base_bytes)
    planned = planned_memory(traces, plan.placement)
    plan.memory = PlannedMemory(traces, planned, process, base_bytes)
    batch_bytes = _batch_bytes(plan.network, plan.shape)
    check_workers(train, plan.placement, batch_bytes, plan.findings)
    _check_memory(plan.placement, plan.memory, plan.findings)
    steps = train.epochs * (plan.steps_per_epoch or 0)
    board_bytes = _board_bytes(train, steps, len(list(plan.network.parameters())), batch_bytes)
    plan.disk = _disk(train, traces, plan.placement, board_bytes, paths)
    if plan.data:
        plan.body = frozen_body(plan.network, train, plan.data.plan, plan.placement)
        if isinstance(plan.body, FrozenBody):
            num_rows = plan.data.num_train + len(plan.data.val)
            plan.disk["features"] = 4 * plan.body.width * num_rows
    new = ("checkpoints", "model", "TensorBoard", "features")
    written = sum(plan.disk.get(name, 0) for name in new)
    folders = [(paths.work, written)]
    if train.offload_path:
        offloaded = plan.memory.device.disk * plan.placement.devices
        folders.append((Path(train.offload_path), offloaded))
    check_disks(folders, plan.findings)
    if timing_seconds and plan.data and not plan.findings.mismatches:
        plan.seconds = _seconds(
            params.seed,
            train,
            plan.data,
            plan.shape,
            plan.placement,
            timing_seconds,
            stores_features=isinstance(plan.body, FrozenBody),
        )
    return plan


def process_bytes(traces: Traces, placement: Placement, base_bytes: int) -> int:
    """Predict the bytes that a process takes in the host's memory.

    `base_bytes` are those of a process with all modules imported and no network.

    A process that trains on a GPU holds the whole float32 network there once, at the start.
    """
    memory = planned_memory(traces, placement)
    on_gpu = placement.accelerator == "gpu"
    return host_bytes(memory, traces.full.parameters, base_bytes, on_gpu=on_gpu)


def host_bytes(memory: DeviceMemory, network_bytes: int, base_bytes: int, *, on_gpu: bool) -> int:
    """Predict the same for a process whose tensors are planned; the network is in float32."""
    tensors = max(network_bytes, memory.host) if on_gpu else with_slack(memory) + memory.host
    return base_bytes + _TRAINER_BYTES + tensors


def with_slack(memory: DeviceMemory) -> int:
    """Return the bytes that tensors on a CPU take of the process."""
    return memory.total + int((CPU_SLACK - 1) * memory.activations)


def available_bytes(*, on_gpu: bool) -> int | None:
    """Return the free bytes of the GPU, or else of the machine or container; None if unknown."""
    if not on_gpu:
        return free_bytes()
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def _data(paths: Paths, findings: Findings) -> TrainingData | None:
    try:
        return open_data(paths.packed, paths.augmented)
    except SlipwayError as error:
        findings.remarks.append(
            f"{error} Rows, steps, classes, time and the network of a table are unknown without "
            "it: run `dvc repro augment` for these."
        )
        return None


def _network(params: Params, plan: ResourcePlan) -> Network | None:
    if plan.data:
        spec = network_spec(params.train, plan.data.manifest)
    elif "early_spec" in kind_of(params.data.task).input.parts:
        spec = _early_spec(params, plan.findings)
    else:
        return None
    torch.manual_seed(params.seed)
    try:
        network = build_network(spec)
        freeze_body(network, params.train)
        return network
    except SlipwayError as error:
        plan.findings.mismatches.append(str(error))
        return None


def _early_spec(params: Params, findings: Findings) -> NetworkSpec:
    kind = kind_of(params.data.task)
    if kind.target.has_classes and params.data.classes is None:
        findings.remarks.append(
            "the number of classes is not known yet: the last layer is counted for 2"
        )
    make: Callable[[Params], NetworkSpec] = kind.input.load_part("early_spec")
    return make(params)


def _shape(
    train: TrainParams, placement: Placement, data: TrainingData | None, findings: Findings
) -> StepShape | None:
    if data and data.num_train < train.batch_size:
        findings.mismatches.append(
            f"train.batch_size is {train.batch_size}, but there are only {data.num_train} training "
            f"rows. Use at most {data.num_train}."
        )
    try:
        return step_shape(train, placement)
    except SlipwayError as error:
        findings.mismatches.append(str(error))
        return None


def _check_memory(placement: Placement, memory: PlannedMemory, findings: Findings) -> None:
    if placement.accelerator == "gpu":
        check_memory(memory.device.total, available_bytes(on_gpu=True), "each GPU", findings)
    needed, available = memory.process_bytes * placement.devices, available_bytes(on_gpu=False)
    what = f"{placement.devices} process{'es' * (placement.devices > 1)} in the host's memory"
    check_memory(needed, available, what, findings)


def _batch_bytes(network: Network, shape: StepShape) -> int:
    contract = network.spec.input
    value_bytes = np.dtype(contract.dtype).itemsize
    return shape.per_device * int(torch.Size(contract.shape).numel()) * value_bytes


def _disk(
    train: TrainParams, traces: Traces, placement: Placement, board_bytes: int, paths: Paths
) -> dict[str, int]:
    """Predict bytes on disk by purpose; "checkpoints" are all that exist at the same time."""
    checkpoint = checkpoint_bytes(traces, placement.strategy, placement.precision)
    # The two newest, the best epoch of each (with keep: best), and the one being written.
    num_checkpoints = 5 if train.keep == "best" else 3
    return {
        "checkpoint": checkpoint,
        "checkpoints": num_checkpoints * checkpoint,
        "model": traces.full.parameters + traces.full.buffers,
        "TensorBoard": board_bytes,
        "packed store": folder_bytes(paths.packed),
    }


def checkpoint_bytes(traces: Traces, strategy: str, precision: str) -> int:
    """Predict the size of one checkpoint, of all processes together."""
    full = traces.full
    checkpoint = full.parameters + full.optimizer + full.buffers
    if strategy.startswith("deepspeed"):  # ZeRO also saves its half-precision weights
        checkpoint += full.parameters if precision == "32-true" else traces.cast.parameters
    return checkpoint


def _board_bytes(train: TrainParams, steps: int, num_tensors: int, batch_bytes: int) -> int:
    num_scalars = (steps // train.log_every_steps + train.epochs) * _NUM_SCALARS
    num_histograms = 0
    if every := train.log_histograms_every_epochs:
        num_histograms = 2 * num_tensors * (train.epochs // every)
    return num_scalars * _SCALAR_BYTES + batch_bytes + num_histograms * _HISTOGRAM_BYTES


def _seconds(
    seed: int,
    train: TrainParams,
    data: TrainingData,
    shape: StepShape,
    placement: Placement,
    max_seconds: float,
    *,
    stores_features: bool,
) -> PlannedSeconds:
    one_batch = StepShape(shape.per_device, shape.per_device, 1, 1)
    rehearsal = Rehearsal(seed, train, data, placement, one_batch)
    step = rehearsal.step_seconds(_TIMED_STEPS, max_seconds * 0.8) * shape.num_accumulated
    rows = min(train.max_batch_per_device, -(-len(data.val) // placement.num_readers))
    forward = rehearsal.forward_seconds(_TIMED_STEPS, max_seconds * 0.2) / shape.per_device * rows
    num_batches = -(-len(data.val) // (rows * placement.num_readers))
    # Processes on a CPU share its cores, so each takes as many times longer.
    competing = placement.devices if placement.accelerator == "cpu" else 1
    features = 0.0
    if stores_features:
        whole = Rehearsal(seed, train, data, placement, one_batch, reads_features=False)
        per_row = whole.forward_seconds(_TIMED_STEPS, max_seconds * 0.2) / shape.per_device
        features = per_row * (data.num_train + len(data.val)) / placement.num_readers
    return PlannedSeconds(step * competing, forward * num_batches * competing, features * competing)
