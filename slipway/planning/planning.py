"""Predicts what the training of params.yaml takes, and holds it against this machine, before anything is spent."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from slipway.config.params import Params
from slipway.config.sections import TrainParams
from slipway.inputs.images import ImageContract
from slipway.kinds.registry import is_classification, is_table
from slipway.planning.available_memory import available_bytes
from slipway.planning.memory_plan import DeviceMemory, Traces, planned_memory, trace_all
from slipway.planning.plan_checks import (
    Findings,
    check_disk,
    check_memory,
    check_packages,
    check_placement,
    check_workers,
)
from slipway.planning.rehearsal import Rehearsal
from slipway.system.errors import SlipwayError
from slipway.training.batches.batches import StepShape, cut_step
from slipway.training.distributed.process_memory import own_bytes
from slipway.training.distributed.strategies import Placement, TrainingHost
from slipway.training.job import Paths, TrainingData, network_spec, open_data
from slipway.training.networks.initialization import image_network_spec
from slipway.training.networks.networks import Network, NetworkSpec, build_network
from slipway.training.telemetry.costs import folder_bytes

# On the CPU a process holds more than its tensors: kernels' own memory and what the allocator keeps. Measured: 1.1 to 1.6 times
# (bench/results/memory_plan.md).
CPU_SLACK = 1.25
_TRAINER_BYTES = (
    90_000_000  # of Lightning's loops, TensorBoard and DVCLive, once they run; measured
)
_EVENT_BYTES = 60  # of a scalar in TensorBoard's files
_NUM_SCALARS = 7
_HISTOGRAM_BYTES = 4500  # measured on weights and gradients of the demo
_TIMED_STEPS = 10


class PlannedMemory(NamedTuple):
    """Of one process."""

    traces: Traces
    device: DeviceMemory  # its tensors
    process_bytes: int | None  # on the CPU, with everything else that it holds


class PlannedSeconds(NamedTuple):
    """Measured on a few real steps, without communication."""

    step: float
    validation: float  # of one epoch


@dataclass
class ResourcePlan:
    """Predictions; None where what they need is not there."""

    findings: Findings = field(default_factory=Findings)
    placement: Placement | None = None
    data: TrainingData | None = None
    shape: StepShape | None = None
    network: Network | None = None
    memory: PlannedMemory | None = None
    disk: dict[str, int] = field(default_factory=dict)  # bytes by what takes them
    seconds: PlannedSeconds | None = None

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps."""
        return self.data.num_train // self.shape.batch_size if self.data and self.shape else None


def make_plan(
    params: Params, paths: Paths, host: TrainingHost, timing_seconds: float
) -> ResourcePlan:
    """Predict, and check against `host`; `timing_seconds` bounds the real steps, 0 for none."""
    train, plan = params.train, ResourcePlan()
    base_bytes = own_bytes()  # of a process that has imported what the trainer imports
    plan.placement = check_placement(train, host, plan.findings)
    plan.data = _data(paths, plan.findings)
    plan.network = _network(params, plan)
    if plan.placement:
        check_packages(train, plan.placement, plan.findings)
        plan.shape = _shape(train, plan.placement, plan.data, plan.findings)
    if plan.network and plan.shape and plan.placement:
        traces = trace_all(
            plan.network, train, plan.shape.per_device, accumulates=plan.shape.num_accumulated > 1
        )
        in_process = (
            None
            if plan.placement.accelerator == "gpu"
            else process_bytes(traces, plan.placement, base_bytes)
        )
        plan.memory = PlannedMemory(traces, planned_memory(traces, plan.placement), in_process)
        _check_memory(train, plan.network, plan.shape, plan.placement, plan.memory, plan.findings)
        steps = train.epochs * (plan.steps_per_epoch or 0)
        board = _board_bytes(
            train,
            steps,
            len(list(plan.network.parameters())),
            _batch_bytes(plan.network, plan.shape),
        )
        plan.disk = _disk(train, plan.memory.traces, plan.placement, board, paths)
        check_disk(
            sum(plan.disk[name] for name in ("saves", "checkpoint", "TensorBoard")),
            paths.work,
            plan.findings,
        )
        if timing_seconds and plan.data and not plan.findings.mismatches:
            plan.seconds = _seconds(
                params.seed, train, plan.data, plan.shape, plan.placement, timing_seconds
            )
    return plan


def _data(paths: Paths, findings: Findings) -> TrainingData | None:
    try:
        return open_data(paths.packed, paths.augmented)
    except SlipwayError as error:
        findings.remarks.append(
            f"{error} Without it there are no rows, steps, classes and time, and for a table no network: run `dvc repro augment` for these."
        )
        return None


def _network(params: Params, plan: ResourcePlan) -> Network | None:
    spec = (
        network_spec(params.train, plan.data.manifest)
        if plan.data
        else _spec_without_data(params, plan.findings)
    )
    if spec is None:
        return None
    torch.manual_seed(params.seed)
    try:
        return build_network(spec)
    except SlipwayError as error:
        plan.findings.mismatches.append(str(error))
        return None


def _spec_without_data(params: Params, findings: Findings) -> NetworkSpec | None:
    if is_table(params.data.task):
        return None
    if is_classification(params.data.task) and params.data.classes is None:
        findings.remarks.append(
            "the number of classes is not known yet: the last layer is counted for 2"
        )
    return image_network_spec(params)


def _shape(
    train: TrainParams, placement: Placement, data: TrainingData | None, findings: Findings
) -> StepShape | None:
    if data and data.num_train < train.batch_size:
        findings.mismatches.append(
            f"train.batch_size is {train.batch_size}, but there are only {data.num_train} training rows. Use at most {data.num_train}."
        )
    try:
        return cut_step(train.batch_size, placement.world_size, train.max_batch_per_device)
    except SlipwayError as error:
        findings.mismatches.append(str(error))
        return None


def process_bytes(traces: Traces, placement: Placement, base_bytes: int) -> int:
    """Of one process on the CPU that held `base_bytes` when it had imported everything."""
    return base_bytes + _TRAINER_BYTES + int(CPU_SLACK * planned_memory(traces, placement).total)


def _check_memory(
    train: TrainParams,
    network: Network,
    shape: StepShape,
    placement: Placement,
    memory: PlannedMemory,
    findings: Findings,
) -> None:
    check_workers(train, placement, _batch_bytes(network, shape), findings)
    available = available_bytes(on_gpu=placement.accelerator == "gpu")
    if memory.process_bytes is None:
        check_memory(memory.device.total, available, "each GPU", findings)
    else:
        what = f"{placement.devices} process{'es' * (placement.devices > 1)} on the CPU"
        check_memory(memory.process_bytes * placement.devices, available, what, findings)


def _batch_bytes(network: Network, shape: StepShape) -> int:
    contract = network.spec.input
    return (
        shape.per_device
        * int(torch.Size(contract.shape).numel())
        * (1 if isinstance(contract, ImageContract) else 4)
    )


def _disk(
    train: TrainParams, traces: Traces, placement: Placement, board_bytes: int, paths: Paths
) -> dict[str, int]:
    """Bytes by what takes them; of "saves" all that are there at a time."""
    full = traces.full
    save = full.parameters + full.optimizer + full.buffers
    if (
        placement.zero_stage is not None
    ):  # the parameters as they compute, besides the float32 masters
        save += full.parameters if placement.precision == "32-true" else traces.cast.parameters
    num_saves = (
        5 if train.keep == "best" else 3
    )  # the newest two, the ones that they keep, and one that is being written
    return {
        "a save": save,
        "saves": num_saves * save,
        "checkpoint": full.parameters + full.buffers,
        "TensorBoard": board_bytes,
        "packed store": folder_bytes(paths.packed),
    }


def _board_bytes(train: TrainParams, steps: int, num_tensors: int, batch_bytes: int) -> int:
    scalars = (steps // train.log_every_steps + train.epochs) * _NUM_SCALARS * _EVENT_BYTES
    every = train.log_histograms_every_epochs
    return (
        scalars
        + batch_bytes
        + (2 * num_tensors * _HISTOGRAM_BYTES * (train.epochs // every) if every else 0)
    )


def _seconds(
    seed: int,
    train: TrainParams,
    data: TrainingData,
    shape: StepShape,
    placement: Placement,
    most: float,
) -> PlannedSeconds:
    alone = StepShape(shape.per_device, shape.per_device, 1, 1)
    rehearsal = Rehearsal(seed, train, data, placement, alone)
    sharing = placement.devices if placement.accelerator == "cpu" else 1  # of the cores
    step = rehearsal.step_seconds(_TIMED_STEPS, most * 0.8) * shape.num_accumulated * sharing
    rows = min(train.max_batch_per_device, -(-len(data.val) // placement.world_size))
    answer = rehearsal.answer_seconds(_TIMED_STEPS, most * 0.2) / shape.per_device * rows
    return PlannedSeconds(
        step, answer * -(-len(data.val) // (rows * placement.world_size)) * sharing
    )
