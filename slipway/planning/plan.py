"""`slipway plan`: predicts the memory, disk space and time that the training needs.

Prints the number of parameters and steps, the disk space, and the memory per device for every
strategy and precision. Times a few real steps to predict the duration. If params.yaml does not fit
this machine, lists every mismatch and ends with exit code 1. After a training, compares the
prediction with the actual costs.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise

from slipway.config.params import Params
from slipway.config.stage_run import run_stage
from slipway.config.training import TrainParams
from slipway.kinds.registry import are_trees
from slipway.planning.gpu_choice import choose_gpus, describe_choices, parse_prices
from slipway.planning.resource_plan import (
    PlannedMemory,
    PlannedSeconds,
    ResourcePlan,
    checkpoint_bytes,
    host_bytes,
    make_plan,
)
from slipway.planning.step_memory import parameter_counts
from slipway.planning.strategy_settings import possible_settings, settings_of_strategies
from slipway.reports.console import duration, size, text_table
from slipway.system.command_line import CommandParser, quiet_when_unread
from slipway.system.cores import num_cores
from slipway.system.errors import UnavailableError
from slipway.training.batches.batches import StepShape
from slipway.training.checkpoints.fingerprint import take_fingerprint
from slipway.training.distributed.placement import Placement, this_host
from slipway.training.job import PROJECT_PATHS, Paths, network_spec, open_data
from slipway.training.networks.frozen_parts import FrozenBody
from slipway.training.networks.networks import Network, build_network
from slipway.training.networks.trees import TreeNetwork
from slipway.training.telemetry.costs import read_costs
from slipway.training.trees.booster import History, fit_trees

_TIMED_ROUNDS = 11  # of trees; the first one also bins the columns, so it counts once
# For each cell of trees: the packed value, its float32 copy with NaN, and LightGBM's bin.
_CELL_BYTES = 4 + 4 + 2
_PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "float32_gradients": "fp32 copy",
    "optimizer": "optimizer",
    "buffers": "buffers",
    "activations": "activations",
    "buckets": "buckets",
    "average": "average",
}


def describe(plan: ResourcePlan, params: Params) -> str:
    """Format the plan for the console; lines whose values are unknown are left out."""
    lines, epochs = [], params.train.epochs
    if plan.network:
        trainable, frozen = parameter_counts(plan.network)
        name = plan.network.spec.name
        lines.append(f"network   {name}, {trainable:,} trainable parameters, {frozen:,} frozen")
    if isinstance(plan.body, FrozenBody):
        lines.append(f"features  {plan.body.width:,} of each row, computed once")
    elif plan.body:
        lines.append(f"features  computed in every epoch, because {plan.body}")
    if shape := plan.shape:
        lines.append(
            f"step      {shape.batch_size} rows = {shape.per_device} per device x "
            f"{shape.world_size} x {shape.num_accumulated} accumulated"
        )
    if steps := plan.steps_per_epoch:
        lines.append(f"steps     {steps:,} per epoch, {steps * epochs:,} in {epochs} epochs")
    if placement := plan.placement:
        lines.append(f"runs as   {placement}")
        lines += [f"  auto    {reason}" for reason in placement.reasons]
    if plan.memory and placement:
        lines += _memory_lines(plan.memory, placement)
    if plan.memory and placement and plan.network and shape:
        lines += _strategy_lines(plan.network, params.train, placement, shape, plan.memory)
    if plan.disk:
        lines += ["disk", *(f"  {name:<12} {size(value)}" for name, value in plan.disk.items())]
    if plan.seconds and steps:
        lines.append(_time_line(plan.seconds, steps, epochs))
    return "\n".join([*lines, *(f"note      {remark}" for remark in plan.findings.remarks)])


def _memory_lines(memory: PlannedMemory, placement: Placement) -> list[str]:
    lines = [f"memory    {size(memory.device.total)} of tensors on each device"]
    lines += [f"  {name:<12} {size(getattr(memory.device, part))}" for part, name in _PARTS.items()]
    if memory.device.host:
        lines.append(f"  {'offloaded':<12} {size(memory.device.host)} in the host's memory")
    if memory.device.disk:
        lines.append(f"  {'on disk':<12} {size(memory.device.disk)} in {placement.offload_path}")
    lines.append(f"  {'process':<12} {size(memory.process_bytes)} in the host's memory")
    return lines


def _strategy_lines(
    network: Network,
    train: TrainParams,
    placement: Placement,
    shape: StepShape,
    memory: PlannedMemory,
) -> list[str]:
    """Format a table of every strategy on this number of processes, and the refused strategies."""
    found, refused = settings_of_strategies(network, train, placement, shape, memory.traces)
    on_gpu, precision, rows = placement.accelerator == "gpu", placement.precision, []
    for strategy, settings in found.items():
        chosen = settings[precision]
        in_full = {name == "32-true": setting for name, setting in settings.items()}
        rows.append(
            [
                chosen.name,
                *(
                    size(in_full[key].memory.total) if key in in_full else ""
                    for key in (True, False)
                ),
                size(
                    host_bytes(
                        chosen.memory,
                        memory.traces.full.parameters,
                        memory.base_bytes,
                        on_gpu=on_gpu,
                    )
                ),
                size(checkpoint_bytes(memory.traces, strategy, precision)),
                size(int(chosen.every_sent_byte)),
            ]
        )
    columns = ["on each device", "fp32", "bf16 or fp16", "host", "checkpoint", "sent a step"]
    return [text_table(columns, rows, "  "), *(f"refused   {text}" for text in refused)]


def _time_line(seconds: PlannedSeconds, steps_per_epoch: int, epochs: int) -> str:
    epoch = seconds.step * steps_per_epoch + seconds.validation
    once = f"{seconds.features:,.1f} s of features, " if seconds.features else ""
    return (
        f"time      {once}{seconds.step * 1000:,.1f} ms a step, {epoch:,.1f} s an epoch, "
        f"{duration(seconds.features + epoch * epochs)} in total, without communication and "
        "checkpoints"
    )


def describe_gpus(plan: ResourcePlan, params: Params, prices: Mapping[str, float]) -> str:
    """Format the smallest setting for each type of GPU, or the reason why none is known."""
    if not (plan.network and plan.shape and plan.memory and plan.steps_per_epoch):
        return (
            "note      the smallest settings of GPUs need the packed store: run `dvc repro augment`"
        )
    train = params.train
    half = "bf16-mixed" if train.precision == "auto" else train.precision
    settings, refusals = possible_settings(
        plan.network, train, half, plan.memory.traces, plan.shape.per_device
    )
    choices = choose_gpus(settings, train.precision, plan.steps_per_epoch * train.epochs, prices)
    lines = [describe_choices(choices, prices), *(f"refused   {text}" for text in refusals)]
    return "\n".join(lines)


def compare_costs(plan: ResourcePlan, params: Params, paths: Paths) -> str:
    """Format the plan beside the measured costs of the last training; "" if either is missing."""
    costs, placement = read_costs(paths.costs), plan.placement
    if not (costs and placement and plan.data and plan.network and plan.memory):
        return ""
    run = take_fingerprint(
        params.seed, params.train, placement, paths.packed, paths.augmented, paths.root
    ).name
    if costs.run != run:
        return (
            f"note      {paths.costs} describes the training {costs.run}, not these params, data "
            f"and code ({run}): nothing to compare"
        )
    seconds, disk = plan.seconds, plan.disk
    peak = plan.memory.device.total if costs.on_gpu else plan.memory.process_bytes
    pairs: list[tuple[str, float | None, float, str]] = [
        ("parameters", sum(parameter_counts(plan.network)), costs.num_parameters, ",.0f"),
        ("peak memory, MB", peak and peak / 1e6, costs.peak_bytes / 1e6, ",.1f"),
        ("a step, ms", seconds and seconds.step * 1000, costs.step_seconds * 1000, ",.1f"),
        ("validation, s", seconds and seconds.validation, costs.validation_seconds, ",.3f"),
        ("checkpoint, MB", disk["checkpoint"] / 1e6, costs.checkpoint_bytes / 1e6, ",.2f"),
        ("model, MB", disk["model"] / 1e6, costs.model_bytes / 1e6, ",.2f"),
        ("TensorBoard, MB", disk["TensorBoard"] / 1e6, costs.board_bytes / 1e6, ",.3f"),
    ]
    rows = []  # of the figures that both sides have
    for name, predicted, actual, form in pairs:
        if predicted and actual:
            error = f"{(predicted - actual) / actual:+.1%}"
            rows.append([name, format(predicted, form), format(actual, form), error])
    table = text_table(["", "predicted", "actual", "error"], rows, "  ")
    return f"the last training of these params, in its first process\n{table}"


def plan_trees(params: Params, paths: Paths) -> str:
    """Run a few rounds on the packed data, and describe the network, the memory and the time.

    Raises SchemaError if the data are not packed yet.
    """
    train = params.train
    data = open_data(paths.packed, paths.augmented)
    network = build_network(network_spec(train, data.manifest))
    assert isinstance(network, TreeNetwork)
    times: list[float] = [time.perf_counter()]

    def note(_: History) -> None:
        times.append(time.perf_counter())

    rounds = train.model_copy(
        update={"epochs": min(train.epochs, _TIMED_ROUNDS), "early_stopping_patience": None}
    )
    fit_trees(network, params.seed, rounds, data, num_cores(), note)
    seconds = [after - before for before, after in pairwise(times)]
    usual = statistics.median(seconds[1:] or seconds)
    total = seconds[0] + usual * (train.epochs - 1)
    leaves = network.arguments.num_leaves
    cells = (data.num_train + len(data.val)) * data.manifest.input.shape[0]
    stop = " or less, if it stops early" if train.early_stopping_patience else ""
    return "\n".join(
        [
            f"network   {train.network}, up to {train.epochs} rounds of trees with up to {leaves} "
            "leaves",
            f"rows      {data.num_train:,} for training, {len(data.val):,} for validation",
            f"memory    {size(cells * _CELL_BYTES)} of rows and bins beside the process",
            f"time      {usual * 1000:,.1f} ms a round, {total:,.0f} s in total{stop}",
            "note      one process on the CPU; a killed training starts from the first round",
        ]
    )


def _parser() -> CommandParser:
    parser = CommandParser(prog="slipway plan", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="maximum time of the real steps that are timed; 0 for none",
    )
    parser.add_argument(
        "--gpus",
        action="store_true",
        help="tabulate the smallest setting of each type of GPU on which the training fits",
    )
    parser.add_argument(
        "--price-per-gpu-hour",
        action="append",
        default=[],
        metavar="NAME=PRICE",
        help="hourly price of one GPU of a type, for the price of the whole run; repeatable",
    )
    return parser


@quiet_when_unread()
def main(arguments: Sequence[str] | None = None) -> None:
    """Run `slipway plan`."""
    given = _parser().parse_args(arguments)

    def run(params: Params) -> None:
        prices = parse_prices(given.price_per_gpu_hour)
        if members := params.ensemble.members:
            print(f"ensemble  {len(members)} members in turn; this is the plan of `train` alone")
        if are_trees(params.train.network):
            print(plan_trees(params, PROJECT_PATHS), flush=True)
            return
        plan = make_plan(params, PROJECT_PATHS, this_host(), given.seconds)
        texts = [describe(plan, params), compare_costs(plan, params, PROJECT_PATHS)]
        if given.gpus or prices:
            texts.append(describe_gpus(plan, params, prices))
        print("\n".join(filter(None, texts)), flush=True)
        if problems := plan.findings.mismatches:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise UnavailableError(f"this training cannot run here:\n{listed}")

    run_stage(run)


if __name__ == "__main__":
    main()
