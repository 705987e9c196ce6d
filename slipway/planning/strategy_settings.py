"""The strategies possible for a training on 1, 2, 4 ... GPUs, with the memory and work of each GPU.

Settings are predicted from traces of the network, and know no type of GPU.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from slipway.config.training import SHARING, TrainParams
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
from slipway.system.errors import ParamsError, SlipwayError, UnavailableError
from slipway.training.batches.batches import StepShape
from slipway.training.distributed.execution import check_execution
from slipway.training.distributed.pipeline import blocks_of_stage
from slipway.training.distributed.placement import Placement, TrainingHost, place
from slipway.training.distributed.zero_sizes import largest_block
from slipway.training.job import check_division, step_shape
from slipway.training.networks.blocks import check_blocks, parallel_blocks
from slipway.training.networks.divided_layers import narrow, narrowed, parallel_layers
from slipway.training.networks.networks import Network, example_rows

MOST_GPUS = 64
GPUS_OF_A_MACHINE = 8
# Ordered from the least communication to the most.
STRATEGIES_BY_TRAFFIC = (
    "ddp",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "fsdp",
    "deepspeed_stage_3",
)
_OFFLOADING = ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")


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
        return self.memory.host * min(self.num_gpus, GPUS_OF_A_MACHINE)


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
    impossible = ("single",) if size > 1 else SHARING
    tried = [name for name in STRATEGIES if name not in impossible]
    if size == 1:
        refused.append(f"{' and '.join(SHARING)}: they divide the network over several processes")
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
            shared = (placement.model_parallel or size) if strategy in SHARING else None
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
                trace_all(network, params, rows, accumulates=accumulates, update="together")
                if self._half
                else self._traces[any_rows]._replace(
                    full=trace_step(
                        network, params, rows, accumulates=accumulates, update="together"
                    )
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
            network, self._params, own_rows, num_micro_batches, num_gpus, self._half, "together"
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


def _try_each(
    predict: Callable[[str, int, int | None], Setting], alone: Sequence[str], batch_size: int
) -> tuple[list[Setting], list[str]]:
    """Predict the strategies `alone` on one GPU, and all strategies on several."""
    settings, refused, texts = [], set[tuple[str, int | None]](), dict[str, str]()
    num_gpus = 1
    while num_gpus <= min(MOST_GPUS, batch_size):
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
                if sharing is None or strategy in SHARING:  # else `tensor_parallel` says why
                    texts.setdefault(strategy, f"{strategy} on {gpus}: {error}")
        num_gpus *= 2
    return settings, list(texts.values())


def _layouts(num_gpus: int) -> list[tuple[str, int | None]]:
    """List each strategy, with each number of GPUs of a machine that can share a copy, or all."""
    sizes = [size for size in (2, 4, 8) if size < num_gpus]
    return [
        *((strategy, None) for strategy in STRATEGIES_BY_TRAFFIC),
        *((strategy, size) for strategy in SHARING for size in (*sizes, num_gpus)),
        *(("fsdp", size) for size in sizes),
    ]
