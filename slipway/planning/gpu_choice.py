"""Finds the fewest GPUs of each type on which a training fits, and predicts its hours and price.

A training fits if its planned memory takes at most 90 % of a GPU; the rest is for the CUDA context
and fragmentation. The time of a step is predicted from its floating-point operations, at 40 % of
the rate in the data sheet, and from its communication. Data loading and the latency of messages
are not counted, so the hours are a lower bound.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from slipway.config.training import TrainParams
from slipway.planning.memory_plan import (
    STRATEGIES,
    DeviceMemory,
    Traces,
    device_memory,
    keep_stage,
    trace_all,
    trace_share,
    trace_stage,
    whole_step,
)
from slipway.planning.step_memory import StepMemory, parameter_counts, step_flop, trace_step
from slipway.reports.console import size, text_table
from slipway.system.errors import ParamsError, SlipwayError, UnavailableError
from slipway.training.batches.batches import StepShape
from slipway.training.distributed.execution import check_execution
from slipway.training.distributed.pipeline import blocks_of_stage
from slipway.training.distributed.placement import Placement, TrainingHost, auto_precision, place
from slipway.training.distributed.zero_sizes import largest_block
from slipway.training.job import check_division, step_shape
from slipway.training.networks.blocks import check_blocks, parallel_blocks
from slipway.training.networks.divided_layers import narrow, narrowed, parallel_layers
from slipway.training.networks.networks import Network, example_rows

_USABLE, _UTILISATION = 0.9, 0.4
_MOST_GPUS = 64
_GPUS_OF_A_MACHINE = 8
_NETWORK_RATE = 12.5  # GB/s between machines for each GPU: 100 Gb/s
# Ordered from the least communication to the most.
STRATEGIES_BY_TRAFFIC = (
    "ddp",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "fsdp",
    "deepspeed_stage_3",
)
# Strategies in which processes wait for each other's values within a pass.
_WAITING = ("pipeline", "tensor_parallel")
_OFFLOADING = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")


@dataclass(frozen=True)
class GpuType:
    """Figures from NVIDIA's data sheets; rates are in dense TFLOP/s."""

    memory_gb: float  # 10^9 bytes
    half_rate: float  # fp16 or bf16 on tensor cores
    full_rate: float  # float32 without TF32
    link_rate: float  # GB/s in one direction to the GPUs of the same machine: PCIe or NVLink
    bus_rate: float  # GB/s in one direction to the host's memory: PCIe
    has_bfloat16: bool = True


GPU_TYPES = {
    "T4": GpuType(16, 65, 8.1, 16, 16, has_bfloat16=False),
    "L4": GpuType(24, 121, 30.3, 32, 32),
    "A10": GpuType(24, 125, 31.2, 32, 32),
    "L40S": GpuType(48, 362, 91.6, 32, 32),
    "A100-40GB": GpuType(40, 312, 19.5, 300, 32),
    "A100-80GB": GpuType(80, 312, 19.5, 300, 32),
    "H100": GpuType(80, 989, 67, 450, 64),
    "H200": GpuType(141, 989, 67, 450, 64),
}


@dataclass(frozen=True)
class Setting:
    """A strategy on a number of GPUs, with the memory and the work of each GPU in one step."""

    strategy: str
    num_gpus: int
    memory: DeviceMemory
    flop: float  # floating-point operations; a pipeline's idle time counts as operations, too
    sent_bytes: float  # bytes sent to GPUs of the same copy, if several share one
    model_parallel: int | None = None  # GPUs that share a copy of the network; None if none do
    averaged_bytes: float = 0.0  # gradients, and with fsdp weights, sent to the other copies
    moved_bytes: float = 0.0  # bytes moved to the host's memory and back, because of offload

    @property
    def name(self) -> str:
        """The strategy, and `train.model_parallel` if there are several copies."""
        if self.model_parallel in (None, self.num_gpus):
            return self.strategy
        return f"{self.strategy}, model_parallel {self.model_parallel}"

    @property
    def every_sent_byte(self) -> float:
        """Bytes that one GPU sends to others in a step."""
        return self.sent_bytes + self.averaged_bytes

    @property
    def host_bytes(self) -> int:
        """Memory of each host that the offloaded state of its GPUs takes."""
        return self.memory.host * min(self.num_gpus, _GPUS_OF_A_MACHINE)

    def step_seconds(self, kind: GpuType, precision: str) -> float:
        """Predict the seconds of one optimizer step on GPUs of type `kind`.

        Data parallelism sends gradients while it computes, so the longer of the two times counts.
        With `pipeline` and `tensor_parallel` GPUs wait for each other's values, so the times of
        computing and sending add up. They also do with `fsdp` and `model_parallel`, while GPUs
        exchange weights and gradients with the other copies. Offload adds the time on the bus, but
        not that of the CPU.
        """
        rate = kind.full_rate if precision == "32-true" else kind.half_rate
        computing = self.flop / (rate * 1e12 * _UTILISATION)
        sending = self.sent_bytes / _link_rate(kind, self.model_parallel or self.num_gpus)
        averaging = self.averaged_bytes / _link_rate(kind, self.num_gpus)
        if self.strategy in _WAITING:
            return computing + sending + averaging
        if self.model_parallel:
            return max(computing + sending, averaging)
        return max(computing, sending) + self.moved_bytes / (kind.bus_rate * 1e9)


def _link_rate(kind: GpuType, num_gpus: int) -> float:
    """Return the bytes per second that each of `num_gpus` GPUs can send to the others."""
    return 1e9 * (kind.link_rate if num_gpus <= _GPUS_OF_A_MACHINE else _NETWORK_RATE)


@dataclass(frozen=True)
class GpuChoice:
    """A setting on one type of GPU, with the hours and the price of the training."""

    name: str
    setting: Setting
    precision: str
    hours: float
    price: float | None  # price of the whole training; None if the user gave no hourly price

    @property
    def label(self) -> str:
        return f"{self.setting.num_gpus} x {self.name} with {self.setting.name}"


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Parse `NAME=PRICE` arguments into prices per GPU and hour.

    Raises ParamsError for an unknown type of GPU, or a price that is negative or not a number.
    """
    prices = {}
    for text in texts:
        name, _, amount = text.partition("=")
        if name not in GPU_TYPES:
            raise ParamsError(
                f"--price-per-gpu-hour names {name!r}, expected NAME=PRICE with a type of "
                f"{', '.join(GPU_TYPES)}. Write for example H100=2.5."
            )
        try:
            prices[name] = float(amount)
        except ValueError:
            prices[name] = -1.0
        if not 0 <= prices[name] < float("inf"):
            raise ParamsError(
                f"--price-per-gpu-hour is {text!r}, expected a price of at least 0. Write for "
                f"example {name}=2.5."
            )
    return prices


class _Planner:
    """Predicts a training on any number of GPUs, and traces each size of a batch only once.

    Args:
        traces: the plan's traces, for batches of `rows` rows.
        accumulates: gradients are kept between batches in `traces`.
    """

    def __init__(
        self,
        network: Network,
        params: TrainParams,
        precision: str,
        traces: Traces,
        rows: int,
        *,
        accumulates: bool = False,
    ) -> None:
        self._network, self._params, self._precision = network, params, precision
        self._half = None if precision == "32-true" else torch.bfloat16
        self._traces = {(rows, accumulates): traces}
        self._shares = dict[tuple[int, int, int], Setting]()  # of `tensor_parallel`
        self._row_flop = step_flop(network, params, rows) / rows
        self._values = _exchanged_values(network)

    def setting(self, strategy: str, num_gpus: int, model_parallel: int | None) -> Setting:
        """Predict the memory and work of `strategy` on `num_gpus` GPUs.

        Raises SlipwayError if the network or params.yaml rules this setting out.
        """
        params = self._params.model_copy(
            update={
                "strategy": strategy,
                "model_parallel": model_parallel,
                "precision": self._precision,
                "accelerator": "gpu",
                "devices": num_gpus,
                "num_nodes": 1,
            }
        )
        for problem in params.problems():
            raise ParamsError(f"train.{problem}")
        placement = place(params, TrainingHost(num_gpus, has_bfloat16=True, launch=None))
        with suppress(UnavailableError):  # no compiler here, but the GPU's machine may have one
            check_execution(params, placement, self._network.spec.task)
        if strategy == "fsdp":
            check_blocks(self._network, strategy)
        check_division(self._network, placement)
        shape = step_shape(params, placement)
        passes = shape.num_accumulated
        if strategy == "fsdp" and model_parallel:
            return self._sharded_copies(placement, shape)
        if model_parallel:
            shared = self._pipeline if strategy == "pipeline" else self._shared
            return self._with_copies(shared(model_parallel, shape), num_gpus)
        rows = shape.per_device * passes  # rows of each device in one step
        memory = device_memory(
            self._traces_of(shape.per_device, accumulates=passes > 1),
            strategy,
            self._precision,
            num_gpus,
            offload=params.offload,
            on_disk=params.offload_path is not None,
        )
        return Setting(
            strategy,
            num_gpus,
            memory,
            rows * self._row_flop,
            self._sent_state(placement, passes),
            moved_bytes=self._moved_state(placement, passes),
        )

    def _traces_of(self, rows: int, *, accumulates: bool) -> Traces:
        key = (rows, accumulates)
        if key not in self._traces:
            network, params, any_rows = self._network, self._params, next(iter(self._traces))
            self._traces[key] = (
                trace_all(network, params, rows, accumulates=accumulates)
                if self._half
                else self._traces[any_rows]._replace(
                    full=trace_step(network, params, rows, accumulates=accumulates)
                )
            )
        return self._traces[key]

    def _sent_state(self, placement: Placement, passes: int) -> float:
        """Return the bytes of weights and gradients that a process sends in a step."""
        trainable, frozen = parameter_counts(self._network)
        every, itemsize = trainable + frozen, 2 if self._half else 4
        part = (placement.num_readers - 1) / placement.num_readers
        # Bytes of gathered weights plus bytes of reduced gradients.
        sent = {
            "single": 0,
            "ddp": 2 * 4 * trainable,
            "deepspeed_stage_1": 2 * itemsize * trainable,
            "deepspeed_stage_2": itemsize * trainable * (1 + passes),
            "deepspeed_stage_3": itemsize * (2 * every + trainable) * passes,
            "fsdp": (2 * itemsize * every + 4 * trainable) * passes,
        }
        return part * sent[placement.strategy]

    def _moved_state(self, placement: Placement, passes: int) -> float:
        """Return the bytes that a process exchanges with the host's memory in a step."""
        trainable, frozen = parameter_counts(self._network)
        # Gradients go there; updated weights come back, or all weights for each pass.
        moved = {
            None: 0,
            "optimizer": 2 * trainable,
            "optimizer_and_parameters": trainable + 2 * (trainable + frozen) * passes,
        }
        itemsize = 2 if self._half else 4
        return itemsize * moved[placement.offload] / placement.world_size

    def _with_copies(self, setting: Setting, num_gpus: int) -> Setting:
        """Return `setting`, which divides one copy of the network, for several on `num_gpus` GPUs.

        `num_gpus` is a multiple of the GPUs of one copy.
        """
        trainable, frozen = parameter_counts(self._network)
        copies = num_gpus // setting.num_gpus
        gradients = setting.memory.parameters * trainable / (trainable + frozen)
        return replace(
            setting,
            num_gpus=num_gpus,
            model_parallel=setting.num_gpus,
            averaged_bytes=2 * (copies - 1) / copies * gradients,
        )

    def _sharded_copies(self, placement: Placement, shape: StepShape) -> Setting:
        """Predict `fsdp` over copies of the network, each shared by several GPUs."""
        passes, shared = shape.num_accumulated, placement.model_parallel or 1
        whole = self._shared(shared, shape)
        memory = whole.memory
        held = memory.parameters / (4 * sum(parameter_counts(self._network)))
        state = cast = StepMemory(
            memory.parameters,
            memory.gradients,
            memory.optimizer,
            memory.buffers,
            memory.activations,
        )
        if self._half:
            cast = trace_share(
                self._network,
                self._params,
                shape.per_device,
                shared,
                self._half,
                accumulates=passes > 1,
                casts_parameters=True,
            )
        share = Traces(
            state,
            state,
            cast,
            block=4 * largest_block(narrowed(self._network, shared)),
            averages=self._params.ema_decay is not None,
        )
        return replace(
            whole,
            strategy="fsdp",
            num_gpus=placement.world_size,
            memory=device_memory(share, "fsdp", self._precision, placement.num_readers),
            model_parallel=shared,
            averaged_bytes=held * self._sent_state(placement, passes),
        )

    def _shared(self, num_gpus: int, shape: StepShape) -> Setting:
        key = (num_gpus, shape.per_device, shape.num_accumulated)
        if key not in self._shares:
            self._shares[key] = self._trace_shared(num_gpus, shape)
        return self._shares[key]

    def _trace_shared(self, num_gpus: int, shape: StepShape) -> Setting:
        rows, passes = shape.per_device, shape.num_accumulated
        part = partial(narrow, num_processes=num_gpus)
        flop = step_flop(self._network, self._params, rows, part) * passes
        memory = trace_share(
            self._network, self._params, rows, num_gpus, self._half, accumulates=passes > 1
        )
        # All-reduce sends each value twice, except for a process's own part.
        values = 2 * (num_gpus - 1) / num_gpus * self._values.shared * rows * passes
        sent = values * (2 if self._half else 4)
        return Setting("tensor_parallel", num_gpus, self._whole(memory), flop, sent)

    def _pipeline(self, num_gpus: int, shape: StepShape) -> Setting:
        num_micro_batches, own_rows = shape.num_micro_batches, shape.per_device
        network, rows = self._network, own_rows // num_micro_batches
        stages = [len(blocks_of_stage(network, index, num_gpus)) for index in range(num_gpus)]
        part = partial(keep_stage, index=stages.index(max(stages)), num_stages=num_gpus)
        memory = trace_stage(
            network, self._params, own_rows, num_micro_batches, num_gpus, self._half
        )
        # The first micro-batch passes all stages in turn, so each stage idles for the others.
        slots = num_micro_batches + num_gpus - 1
        flop = step_flop(network, self._params, rows, part) * slots
        sent = 2 * 4 * self._values.passed * own_rows
        return Setting("pipeline", num_gpus, self._whole(memory), flop, sent)

    def _whole(self, step: StepMemory) -> DeviceMemory:
        return whole_step(step, averages=self._params.ema_decay is not None)


@dataclass
class _ExchangedValues:
    """Number of values that processes exchange for one row in a forward or backward pass."""

    shared: int = 0  # values that tensor parallelism sums over the processes
    passed: int = 0  # values that one pipeline stage hands to the next


def _exchanged_values(network: Network) -> _ExchangedValues:
    """Count the exchanged values in a forward pass on fake tensors, which hold no data."""
    found = _ExchangedValues()

    def count(value: Any) -> int:
        return sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))

    def shared(by: str, _: nn.Module, inputs: Any, output: Any) -> None:
        # A layer divided by inputs sums its outputs in the forward pass; a layer divided by
        # outputs sums the gradients of its inputs in the backward pass.
        found.shared += count(output if by == "inputs" else inputs)

    def passed(_: nn.Module, inputs: Any, output: Any) -> None:
        found.passed = count(output)

    blocks = parallel_blocks(network)
    hooks = [block.register_forward_hook(passed) for block in blocks]
    for block in blocks:
        modules = dict(block.named_modules())
        hooks += [
            modules[layer.name].register_forward_hook(partial(shared, layer.by))
            for layer in parallel_layers(network)
            if layer.name in modules
        ]
    was_training = network.training
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            network.eval()(example_rows(network.spec))
    finally:
        network.train(was_training)
        for hook in hooks:
            hook.remove()
    return found


def possible_settings(
    network: Network, params: TrainParams, precision: str, traces: Traces, rows: int
) -> tuple[list[Setting], list[str]]:
    """Predict every strategy on 1, 2, 4 ... GPUs, and list why strategies are impossible.

    Args:
        traces: the plan's traces, for batches of `rows` rows.

    Returns:
        The possible settings, and one message for each strategy that was refused.
    """
    predict = _Planner(network, params, precision, traces, rows).setting
    alone = ("single",) if params.offload is None else _OFFLOADING
    return _try_each(predict, alone, params.batch_size)


def settings_of_strategies(
    network: Network, params: TrainParams, placement: Placement, shape: StepShape, traces: Traces
) -> tuple[dict[str, dict[str, Setting]], list[str]]:
    """Predict each strategy on the processes of `placement`, in its precision and another one.

    Args:
        shape: the step of `placement`.
        traces: those of the plan.

    Returns:
        The settings by strategy and precision, that of `placement` first, and one message for each
        strategy that cannot divide this training.
    """
    found, refused, size = dict[str, dict[str, Setting]](), list[str](), placement.world_size
    impossible = ("single",) if size > 1 else _WAITING
    tried = [name for name in STRATEGIES if name not in impossible]
    if size == 1:
        refused.append(f"{' and '.join(_WAITING)}: they divide the network over several processes")
    other = "bf16-mixed" if placement.precision == "32-true" else "32-true"
    for precision in (placement.precision, other):
        planner = _Planner(
            network,
            params,
            precision,
            traces,
            shape.per_device,
            accumulates=shape.num_accumulated > 1,
        )
        for strategy in tried:
            shared = (placement.model_parallel or size) if strategy in _WAITING else None
            if strategy == placement.strategy == "fsdp":
                shared = placement.model_parallel
            try:
                setting = planner.setting(strategy, size, shared)
            except SlipwayError as error:
                refused.append(f"{strategy}: {error}")
            else:
                found.setdefault(strategy, {})[precision] = setting
        tried = list(found)  # the second precision of each
    return found, refused


def _try_each(
    predict: Callable[[str, int, int | None], Setting], alone: Sequence[str], batch_size: int
) -> tuple[list[Setting], list[str]]:
    """Predict the strategies `alone` on one GPU, and all strategies on several."""
    settings, refused, texts = [], set[tuple[str, int | None]](), dict[str, str]()
    num_gpus = 1
    while num_gpus <= min(_MOST_GPUS, batch_size):
        layouts = _layouts(num_gpus) if num_gpus > 1 else [(strategy, None) for strategy in alone]
        for strategy, sharing in layouts:
            if (strategy, sharing) in refused:
                continue
            try:
                settings.append(predict(strategy, num_gpus, sharing))
            except SlipwayError as error:
                refused.add((strategy, sharing))
                gpus = f"{num_gpus} GPU{'s' * (num_gpus > 1)}"
                if sharing and sharing < num_gpus:
                    gpus += f", {sharing} for each copy"
                if sharing is None or strategy in _WAITING:  # else `tensor_parallel` says why
                    texts.setdefault(strategy, f"{strategy} on {gpus}: {error}")
        num_gpus *= 2
    return settings, list(texts.values())


def _layouts(num_gpus: int) -> list[tuple[str, int | None]]:
    """List each strategy, with each number of GPUs of a machine that can share a copy, or all."""
    sizes = [size for size in (2, 4, 8) if size < num_gpus]
    return [
        *((strategy, None) for strategy in STRATEGIES_BY_TRAFFIC),
        *((strategy, size) for strategy in _WAITING for size in (*sizes, num_gpus)),
        *(("fsdp", size) for size in sizes),
    ]


def choose_gpus(
    settings: Sequence[Setting], precision: str, num_steps: int, prices: Mapping[str, float]
) -> list[GpuChoice]:
    """List each setting on each type of GPU whose memory is large enough for it.

    For each type, settings are ordered by their number of GPUs, then by their hours. `prices` are
    per GPU and hour, by type. `precision` may be "auto", for settings in half precision.
    """
    found = []
    for name, kind in GPU_TYPES.items():
        fitting = [
            _choice(name, setting, chosen, num_steps * setting.step_seconds(kind, chosen), prices)
            for setting in settings
            if setting.memory.total <= _USABLE * kind.memory_gb * 1e9
            for chosen in _possible_precision(kind, setting.strategy, precision)
        ]
        found += sorted(fitting, key=lambda choice: (choice.setting.num_gpus, choice.hours))
    return found


def _possible_precision(kind: GpuType, strategy: str, precision: str) -> list[str]:
    """Return the precision of a training on GPUs of type `kind`, or nothing if there is none."""
    if precision == "auto":
        host = TrainingHost(1, has_bfloat16=kind.has_bfloat16, launch=None)
        chosen: str = auto_precision(host, "gpu", strategy, [])
        return [] if chosen == "32-true" else [chosen]  # which takes more memory than was planned
    return [] if precision == "bf16-mixed" and not kind.has_bfloat16 else [precision]


def _choice(
    name: str, setting: Setting, precision: str, seconds: float, prices: Mapping[str, float]
) -> GpuChoice:
    hours = seconds / 3600
    price = prices[name] * hours * setting.num_gpus if name in prices else None
    return GpuChoice(name, setting, precision, hours, price)


def describe_choices(choices: Sequence[GpuChoice], prices: Mapping[str, float]) -> str:
    """Format a table of each type's smallest setting, then the fastest and the cheapest one."""
    if not choices:
        return (
            f"gpus      fits on none of {', '.join(GPU_TYPES)}, with at most {_MOST_GPUS} of them. "
            "Lower train.max_batch_per_device, or use train.offload."
        )
    smallest: dict[str, GpuChoice] = {}
    for choice in choices:
        smallest.setdefault(choice.name, choice)
    rows = [
        [
            choice.name,
            str(choice.setting.num_gpus),
            choice.setting.name,
            choice.precision,
            size(choice.setting.memory.total),
            size(int(choice.setting.every_sent_byte)),
            f"{choice.hours:,.2f}",
            "" if choice.price is None else f"{choice.price:,.2f}",
        ]
        for choice in smallest.values()
    ]
    columns = ["smallest setting", "GPUs", "strategy", "precision", "memory of each"]
    columns += ["sent a step", "hours", "price"]
    if any(choice.setting.host_bytes for choice in choices):
        columns.append("memory of each host")
        for row, choice in zip(rows, smallest.values(), strict=True):
            row.append(size(choice.setting.host_bytes))
    lines = [text_table(columns, rows, "  ")]
    fastest = min(choices, key=lambda choice: choice.hours)
    lines.append(f"fastest   {fastest.label}, {fastest.hours:,.2f} hours")
    priced = [(choice.price, choice) for choice in choices if choice.price is not None]
    if priced:
        price, cheapest = min(priced, key=lambda pair: (pair[0], pair[1].setting.num_gpus))
        lines.append(f"cheapest  {cheapest.label}, {price:,.2f}")
    missing = [name for name in smallest if name not in prices]
    if prices and missing:
        lines.append(
            f"note      no price for {', '.join(missing)}: add --price-per-gpu-hour NAME=PRICE"
        )
    return "\n".join(lines)
