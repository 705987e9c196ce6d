"""`python -m slipway.training.plan`: what the training of params.yaml takes, before anything is spent.

Parameters, memory on each device for every strategy and precision, steps, disk and, after a few real steps, time; every mismatch with
this machine at once, and exit code 1 where there is one. After a training it says how far it was off.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipway.command import run_stage
from slipway.contract import is_classification, is_table
from slipway.errors import SlipwayError, UnavailableError
from slipway.params import Params, TrainParams
from slipway.preprocess import ImageContract
from slipway.reports.console import size, text_table
from slipway.training.available_memory import available_bytes
from slipway.training.batches import StepShape, cut_step
from slipway.training.costs import Costs, folder_bytes, read_costs
from slipway.training.fingerprint import take_fingerprint
from slipway.training.memory_plan import STRATEGIES, DeviceMemory, Traces, device_memory, planned_memory, trace_all
from slipway.training.networks import Network, NetworkSpec, build_network
from slipway.training.plan_checks import Findings, check_disk, check_memory, check_packages, check_placement, check_workers
from slipway.training.process_memory import status_bytes
from slipway.training.rehearsal import Rehearsal
from slipway.training.run import Paths, TrainingData, network_spec, open_data
from slipway.training.step_memory import parameter_counts
from slipway.training.strategies import Machine, Placement, this_machine

PATHS = Paths(
    packed=Path("data/packed"),
    augmented=Path("data/augmented"),
    checkpoint=Path("artifacts/checkpoint"),
    metrics=Path("metrics/train.json"),
    live=Path("reports/live"),
    work=Path(".work/train"),
    tensorboard=Path(".work/tensorboard"),
    log=Path(".work/log"),
    costs=Path(".work/plan/costs.json"),
    root=Path(),
)
# On the CPU a process holds more than its tensors: kernels' own memory and what the allocator keeps. Measured: 1.1 to 1.4 times
# (bench/results/memory_plan.md).
_CPU_SLACK = 1.25
_EVENT_BYTES = 60  # of a scalar in TensorBoard's files
_NUM_SCALARS = 7
_TIMED_STEPS = 10


@dataclass
class Plan:
    """Predictions; None where what they need is not there."""

    findings: Findings = field(default_factory=Findings)
    placement: Placement | None = None
    data: TrainingData | None = None
    shape: StepShape | None = None
    network: Network | None = None
    traces: Traces | None = None
    memory: DeviceMemory | None = None  # of the tensors on one device
    process_bytes: int | None = None  # of one process on the CPU
    disk: dict[str, int] = field(default_factory=dict)  # bytes by what takes them
    step_seconds: float | None = None
    validation_seconds: float | None = None  # of one epoch

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps."""
        return self.data.num_train // self.shape.batch_size if self.data and self.shape else None


def make_plan(params: Params, paths: Paths, machine: Machine, timing_seconds: float) -> Plan:
    """Predict, and check against `machine`; `timing_seconds` bounds the real steps, 0 for none."""
    train, plan = params.train, Plan()
    base_bytes = status_bytes("VmRSS")  # of a process that has imported what the trainer imports
    plan.placement = check_placement(train, machine, plan.findings)
    plan.data = _data(paths, plan.findings)
    plan.network = _network(params, plan)
    if plan.placement:
        check_packages(train, plan.placement, plan.findings)
        plan.shape = _shape(train, plan.placement, plan.data, plan.findings)
    if plan.network and plan.shape and plan.placement:
        _predict_memory(train, plan, base_bytes)
        _predict_disk(train, plan, paths)
        if timing_seconds and plan.data and plan.data.num_train >= plan.shape.per_device and not plan.findings.mismatches:
            _predict_time(params.seed, train, plan, timing_seconds)
    return plan


def _data(paths: Paths, findings: Findings) -> TrainingData | None:
    try:
        return open_data(paths)
    except SlipwayError as error:
        findings.remarks.append(
            f"{error} Without it there are no rows, steps, classes and time, and for a table no network: run `dvc repro augment` for these."
        )
        return None


def _network(params: Params, plan: Plan) -> Network | None:
    spec = network_spec(params.train, plan.data.manifest) if plan.data else _spec_without_data(params, plan.findings)
    if spec is None:
        return None
    torch.manual_seed(params.seed)
    try:
        return build_network(spec)
    except SlipwayError as error:
        plan.findings.mismatches.append(str(error))
        return None


def _spec_without_data(params: Params, findings: Findings) -> NetworkSpec | None:
    """Of images the params know everything but the classes and the pixels' mean, which takes no memory."""
    if is_table(params.data.task):
        return None
    classes = params.data.classes or ["one", "two"]
    if is_classification(params.data.task) and params.data.classes is None:
        findings.remarks.append("the number of classes is not known yet: the last layer is counted for 2")
    precompute = params.precompute
    return NetworkSpec(
        task=params.data.task,
        name=params.train.network,
        arguments=params.train.network_arguments,
        classes=classes if is_classification(params.data.task) else [],
        input=ImageContract(
            kind="images",
            transform=None,
            size_px=precompute.image_size_px,
            channels=precompute.channels,
            fit=precompute.fit,
            interpolation=precompute.interpolation,
            max_pixels=params.clean.max_pixels,
        ),
        mean=[0.5] * precompute.channels,
        std=[0.25] * precompute.channels,
        target_scale=None,
    )


def _shape(train: TrainParams, placement: Placement, data: TrainingData | None, findings: Findings) -> StepShape | None:
    if data and data.num_train < train.batch_size:
        findings.mismatches.append(
            f"train.batch_size is {train.batch_size}, but there are only {data.num_train} training rows. Use at most {data.num_train}."
        )
    try:
        return cut_step(train.batch_size, placement.world_size, train.max_batch_per_device)
    except SlipwayError as error:
        findings.mismatches.append(str(error))
        return None


def _predict_memory(train: TrainParams, plan: Plan, base_bytes: int) -> None:
    assert plan.network and plan.shape and plan.placement
    placement, shape = plan.placement, plan.shape
    plan.traces = trace_all(plan.network, train, shape.per_device, accumulates=shape.num_accumulated > 1)
    plan.memory = planned_memory(plan.traces, placement)
    contract = plan.network.spec.input
    itemsize = 1 if isinstance(contract, ImageContract) else 4
    batch_bytes = shape.per_device * itemsize * int(torch.Size(contract.shape).numel())
    check_workers(train, placement, batch_bytes, plan.findings)
    available = available_bytes(on_gpu=placement.accelerator == "gpu")
    if placement.accelerator == "gpu":
        check_memory(plan.memory.total, available, "each GPU", plan.findings)
        return
    plan.process_bytes = base_bytes + int(_CPU_SLACK * plan.memory.total) + _mapped_bytes(plan.data)
    what = f"{placement.devices} process{'es' * (placement.devices > 1)} on the CPU"
    check_memory(plan.process_bytes * placement.devices - _mapped_bytes(plan.data), available, what, plan.findings)


def _mapped_bytes(data: TrainingData | None) -> int:
    """Of the store's rows, which the system counts as the process's while it has room for them."""
    if data is None:
        return 0
    splits = [*data.train, data.val]
    return sum(len(split) * int(torch.Size(split.inputs.shape[1:]).numel()) * split.inputs.dtype.itemsize for split in splits)


def _predict_disk(train: TrainParams, plan: Plan, paths: Paths) -> None:
    assert plan.traces and plan.placement and plan.shape
    full, cast = plan.traces.full, plan.traces.cast
    save = full.parameters + full.optimizer + full.buffers
    if plan.placement.zero_stage is not None:  # the parameters as they compute, besides the float32 masters
        save += full.parameters if plan.placement.precision == "32-true" else cast.parameters
    num_saves = 5 if train.keep == "best" else 3  # the newest two, the ones that they keep, and one that is being written
    steps = train.epochs * (plan.steps_per_epoch or 0)
    images = min(64, plan.shape.per_device) * int(torch.Size(plan.network.spec.input.shape).numel()) if plan.network else 0
    plan.disk = {
        "a save": save,
        f"saves, at most {num_saves} at a time": num_saves * save,
        "checkpoint": full.parameters + full.buffers,
        "TensorBoard": (steps // train.log_every_steps + train.epochs) * _NUM_SCALARS * _EVENT_BYTES + images,
        "packed store, there already": folder_bytes(paths.packed),
    }
    check_disk(num_saves * save + plan.disk["checkpoint"] + plan.disk["TensorBoard"], paths.work, plan.findings)


def _predict_time(seed: int, train: TrainParams, plan: Plan, seconds: float) -> None:
    assert plan.data and plan.shape and plan.placement
    shape, placement = plan.shape, plan.placement
    rehearsal = Rehearsal(seed, train, plan.data, placement, shape.per_device)
    sharing = placement.devices if placement.accelerator == "cpu" else 1  # of the cores
    plan.step_seconds = rehearsal.step_seconds(_TIMED_STEPS, seconds * 0.8) * shape.num_accumulated * sharing
    rows_at_a_time = min(train.max_batch_per_device, -(-len(plan.data.val) // placement.world_size))
    answers = rehearsal.answer_seconds(_TIMED_STEPS, seconds * 0.2) / shape.per_device * rows_at_a_time
    plan.validation_seconds = answers * -(-len(plan.data.val) // (rows_at_a_time * placement.world_size)) * sharing


def describe(plan: Plan, params: Params) -> str:
    """The whole plan as text."""
    lines: list[str] = []
    if plan.network:
        trainable, frozen = parameter_counts(plan.network)
        lines.append(f"network   {plan.network.spec.name}, {trainable:,} trainable parameters, {frozen:,} frozen")
    if plan.shape:
        shape, steps = plan.shape, plan.steps_per_epoch
        lines.append(
            f"step      {shape.batch_size} rows = {shape.per_device} per device x {shape.world_size} x {shape.num_accumulated} accumulated"
        )
        lines += [f"steps     {steps:,} per epoch, {steps * params.train.epochs:,} in {params.train.epochs} epochs"] if steps else []
    if plan.placement:
        placement = plan.placement
        lines.append(f"runs as   {placement.strategy}, {placement.precision}, {placement.world_size} on {placement.accelerator}")
        lines += [f"  auto    {reason}" for reason in placement.reasons]
    lines += [_describe_memory(plan)] if plan.memory else []
    lines += ["disk", *(f"  {name:<28} {size(value)}" for name, value in plan.disk.items())] if plan.disk else []
    lines += [_describe_time(plan, params.train)] if plan.step_seconds is not None else []
    lines += [f"note      {remark}" for remark in plan.findings.remarks]
    return "\n".join(lines)


def _describe_memory(plan: Plan) -> str:
    assert plan.memory and plan.traces and plan.placement
    world, on_gpu = plan.placement.world_size, plan.placement.accelerator == "gpu"
    parts = ("parameters", "gradients", "optimizer", "buffers", "activations", "buckets")
    chosen = [f"  {name:<12} {size(getattr(plan.memory, name))}" for name in parts]
    rows = []
    for strategy in STRATEGIES[1:] if world > 1 else STRATEGIES:
        totals = [device_memory(plan.traces, strategy, name, world, on_gpu=on_gpu).total for name in ("32-true", "bf16-mixed", "16-mixed")]
        rows.append([strategy, *map(size, totals)])
    process = [f"  {'process':<12} {size(plan.process_bytes)}, with the interpreter, libraries and slack"] if plan.process_bytes else []
    table = text_table(["tensors on each device", "fp32", "bf16", "fp16"], rows, "  ")
    return "\n".join([f"memory    {size(plan.memory.total)} of tensors on each device", *chosen, *process, table])


def _describe_time(plan: Plan, train: TrainParams) -> str:
    assert plan.step_seconds is not None and plan.validation_seconds is not None and plan.steps_per_epoch
    epoch = plan.step_seconds * plan.steps_per_epoch + plan.validation_seconds
    alone = plan.placement is None or plan.placement.world_size == 1
    text = f"time      {plan.step_seconds * 1000:,.1f} ms a step, {epoch:,.1f} s an epoch, {_duration(epoch * train.epochs)} in all"
    return text if alone else f"{text}, without communication"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def compare(plan: Plan, costs: Costs) -> str:
    """Predicted beside actual, and by how much the prediction is off."""
    assert plan.network and plan.memory
    in_process = plan.memory.total if costs.on_gpu else plan.process_bytes
    pairs: list[tuple[str, float | None, float, str]] = [
        ("parameters", sum(parameter_counts(plan.network)), costs.num_parameters, ",.0f"),
        ("peak memory, MB", in_process and in_process / 1e6, costs.peak_bytes / 1e6, ",.1f"),
        ("a step, ms", plan.step_seconds and plan.step_seconds * 1000, costs.step_seconds * 1000, ",.1f"),
        ("validation, s", plan.validation_seconds, costs.validation_seconds, ",.3f"),
        ("a save, MB", plan.disk["a save"] / 1e6, costs.save_bytes / 1e6, ",.2f"),
        ("checkpoint, MB", plan.disk["checkpoint"] / 1e6, costs.checkpoint_bytes / 1e6, ",.2f"),
        ("TensorBoard, MB", plan.disk["TensorBoard"] / 1e6, costs.board_bytes / 1e6, ",.3f"),
    ]
    rows = [
        [name, format(predicted, form), format(actual, form), f"{(predicted - actual) / actual:+.1%}"]
        for name, predicted, actual, form in pairs
        if predicted is not None and actual
    ]
    return "the last training of these params\n" + text_table(["", "predicted", "actual", "error"], rows, "  ")


def _comparison(plan: Plan, params: Params, paths: Paths) -> str | None:
    costs = read_costs(paths.costs)
    if costs is None or plan.placement is None or plan.data is None or plan.memory is None:
        return None
    run = take_fingerprint(params.seed, params.train, plan.placement, paths.packed, paths.augmented, paths.root).name
    if costs.run != run:
        return f"note      {paths.costs} is of the training {costs.run}, not of these params, data and code ({run}): nothing to compare"
    return compare(plan, costs)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m slipway.training.plan", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="bound of the real steps that are timed; 0 for none")
    arguments = parser.parse_args()

    def run(params: Params) -> None:
        plan = make_plan(params, PATHS, this_machine(), arguments.seconds)
        print("\n".join(filter(None, [describe(plan, params), _comparison(plan, params, PATHS)])), flush=True)
        if problems := plan.findings.mismatches:
            raise UnavailableError("this cannot work:\n" + "\n".join(f"  {problem}" for problem in problems))

    run_stage(run)


if __name__ == "__main__":
    main()
