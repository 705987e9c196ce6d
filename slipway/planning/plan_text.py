"""A plan as text for a terminal, and beside it what a training really took."""

from slipway.config.params import Params
from slipway.planning.memory_plan import STRATEGIES, device_memory
from slipway.planning.planning import PlannedMemory, PlannedSeconds, ResourcePlan
from slipway.planning.step_memory import parameter_counts
from slipway.reports.console import size, text_table
from slipway.training.batches.batches import StepShape
from slipway.training.distributed.strategies import Placement
from slipway.training.networks.networks import Network
from slipway.training.telemetry.costs import Costs

_PARTS = ("parameters", "gradients", "optimizer", "buffers", "activations", "buckets")
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def describe(plan: ResourcePlan, params: Params) -> str:
    """The whole plan; what is not known is left out."""
    lines = _network(plan.network) if plan.network else []
    lines += _steps(plan.shape, plan.steps_per_epoch, params.train.epochs) if plan.shape else []
    lines += _placement(plan.placement) if plan.placement else []
    lines += _memory(plan.memory, plan.placement) if plan.memory and plan.placement else []
    lines += (
        ["disk", *(f"  {name:<12} {size(value)}" for name, value in plan.disk.items())]
        if plan.disk
        else []
    )
    lines += (
        [_time(plan.seconds, plan.steps_per_epoch, params.train.epochs)]
        if plan.seconds and plan.steps_per_epoch
        else []
    )
    return "\n".join([*lines, *(f"note      {remark}" for remark in plan.findings.remarks)])


def _network(network: Network) -> list[str]:
    trainable, frozen = parameter_counts(network)
    return [f"network   {network.spec.name}, {trainable:,} trainable parameters, {frozen:,} frozen"]


def _steps(shape: StepShape, per_epoch: int | None, epochs: int) -> list[str]:
    cut = (
        f"{shape.per_device} per device x {shape.world_size} x {shape.num_accumulated} accumulated"
    )
    known = (
        [f"steps     {per_epoch:,} per epoch, {per_epoch * epochs:,} in {epochs} epochs"]
        if per_epoch
        else []
    )
    return [f"step      {shape.batch_size} rows = {cut}", *known]


def _placement(placement: Placement) -> list[str]:
    line = f"runs as   {placement.strategy}, {placement.precision}, {placement.world_size} on {placement.accelerator}"
    return [line, *(f"  auto    {reason}" for reason in placement.reasons)]


def _memory(memory: PlannedMemory, placement: Placement) -> list[str]:
    process = memory.process_bytes
    whole = (
        [f"  {'process':<12} {size(process)}, with the interpreter and slack"]
        if process is not None
        else []
    )
    parts = [f"  {name:<12} {size(getattr(memory.device, name))}" for name in _PARTS]
    return [
        f"memory    {size(memory.device.total)} of tensors on each device",
        *parts,
        *whole,
        _table(memory, placement),
    ]


def _table(memory: PlannedMemory, placement: Placement) -> str:
    """Each strategy that so many processes can have, in each precision."""
    world, on_gpu = placement.world_size, placement.accelerator == "gpu"
    rows = []
    for strategy in STRATEGIES[1:] if world > 1 else STRATEGIES:
        totals = [
            device_memory(memory.traces, strategy, name, world, on_gpu=on_gpu).total
            for name in _PRECISIONS
        ]
        rows.append([strategy, *map(size, totals)])
    return text_table(["tensors on each device", "fp32", "bf16", "fp16"], rows, "  ")


def _time(seconds: PlannedSeconds, steps_per_epoch: int, epochs: int) -> str:
    epoch = seconds.step * steps_per_epoch + seconds.validation
    return (
        f"time      {seconds.step * 1000:,.1f} ms a step, {epoch:,.1f} s an epoch, {_duration(epoch * epochs)} in all, "
        "without communication and saves"
    )


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def compare(
    network: Network,
    memory: PlannedMemory,
    disk: dict[str, int],
    seconds: PlannedSeconds | None,
    costs: Costs,
) -> str:
    """Predicted beside actual, and by how much the prediction is off; what was not predicted or not measured is left out."""
    held = memory.device.total if costs.on_gpu else memory.process_bytes
    pairs: list[tuple[str, float | None, float, str]] = [
        ("parameters", sum(parameter_counts(network)), costs.num_parameters, ",.0f"),
        ("peak memory, MB", held and held / 1e6, costs.peak_bytes / 1e6, ",.1f"),
        ("a step, ms", seconds and seconds.step * 1000, costs.step_seconds * 1000, ",.1f"),
        ("validation, s", seconds and seconds.validation, costs.validation_seconds, ",.3f"),
        ("a save, MB", disk["a save"] / 1e6, costs.save_bytes / 1e6, ",.2f"),
        ("checkpoint, MB", disk["checkpoint"] / 1e6, costs.checkpoint_bytes / 1e6, ",.2f"),
        ("TensorBoard, MB", disk["TensorBoard"] / 1e6, costs.board_bytes / 1e6, ",.3f"),
    ]
    rows = [
        [
            name,
            format(predicted, form),
            format(actual, form),
            f"{(predicted - actual) / actual:+.1%}",
        ]
        for name, predicted, actual, form in pairs
        if predicted and actual
    ]
    return "the last training of these params, in its first process\n" + text_table(
        ["", "predicted", "actual", "error"], rows, "  "
    )
