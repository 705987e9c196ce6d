"""The strategy `pipeline`: each process runs consecutive blocks and passes on the activations.

A batch is cut into micro-batches, so that all processes compute at the same time: torch's
Schedule1F1B, Narayanan et al. 2021, arXiv:2104.04473. The weights of other processes are empty
tensors in the same places, so names and the order of the optimizer are those of one process.
Frozen stages before the first one that learns keep no values and get no gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils._pytree import keystr, tree_flatten_with_path

from slipway.system.errors import ParamsError
from slipway.system.user_code import is_user_code
from slipway.training.distributed.collectives import gather_objects
from slipway.training.distributed.divided import SharedCopyStrategy, save_without_data
from slipway.training.networks.blocks import (
    STAGE_METHODS,
    block_arguments,
    parallel_blocks,
    stage_problem,
)
from slipway.training.networks.networks import Network, example_rows

# Maps outputs (B, K) and positions in the batch (B,) int64 to a mean loss ().
LossOfRows = Callable[[Tensor, Tensor], Tensor]


def check_stages(network: Network, num_stages: int) -> None:
    """Raise a ParamsError if `network` cannot be divided into `num_stages` of whole blocks."""
    name = network.spec.name
    lacking = [f"{each}()" for each in STAGE_METHODS if not hasattr(network.backbone, each)]
    if lacking:
        raise ParamsError(
            f"train.strategy is 'pipeline', but train.network {name!r} has no stages: it has no "
            f"method {', '.join(lacking)}. Use 'small_transformer', 'encoder' or a network of your "
            "own with these (docs/how-to/own_network.md), or 'fsdp', which divides any network."
        )
    num_blocks = len(parallel_blocks(network))
    if num_stages > num_blocks:
        raise ParamsError(
            f"train.strategy is 'pipeline' on {num_stages} processes, but train.network {name!r} "
            f"has only {num_blocks} blocks, expected one or more for each process. Use at most "
            f"{num_blocks} processes, or more layers in train.network_arguments."
        )
    # Stages of Slipway's own networks are tested; those of the user are tried here.
    if problem := stage_problem(network) if is_user_code(name) else "":
        raise ParamsError(
            f"train.strategy is 'pipeline', but in train.network {name!r} {problem}. See "
            "docs/how-to/own_network.md, or use 'fsdp', which divides any network."
        )


def blocks_of_stage(network: Network, index: int, num_stages: int) -> list[nn.Module]:
    """Return the blocks that stage `index` of `num_stages` computes, in order."""
    blocks = parallel_blocks(network)
    return blocks[_places(len(blocks), index, num_stages)]


def _places(num_blocks: int, index: int, num_stages: int) -> slice:
    return slice(index * num_blocks // num_stages, (index + 1) * num_blocks // num_stages)


def weights_of_stage(network: Network, index: int, num_stages: int) -> set[str]:
    """Return the names of the weights that stage `index` of `num_stages` holds."""
    backbone: Any = network.backbone
    after = _weights(backbone.after_modules())
    own = _weights(blocks_of_stage(network, index, num_stages))
    if index == num_stages - 1:
        own |= after
    if index == 0:
        every = _weights([network])
        own |= every - after - _weights(parallel_blocks(network))
    return {name for name, weight in network.named_parameters() if id(weight) in own}


def _weights(modules: list[nn.Module]) -> set[int]:
    return {id(weight) for module in modules for weight in module.parameters()}


class PipelineStrategy(SharedCopyStrategy):
    """Gives each process of a copy consecutive blocks of `TrainingModule.network`.

    Args:
        num_micro_batches: micro-batches per copy and optimizer step, at least `model_parallel`.
    """

    def __init__(self, num_copies: int, model_parallel: int, num_micro_batches: int) -> None:
        super().__init__(num_copies, model_parallel)
        self._num_micro_batches = num_micro_batches
        self._stage: Stage | None = None
        # Schedules by rows of a micro-batch, training, and the first stage that learns.
        self._schedules: dict[tuple[int, bool, int], Any] = {}
        self._loss: LossOfRows | None = None  # loss of the current batch

    @property
    def is_divided(self) -> bool:
        return self._stage is not None and all(
            (weight.numel() > 0) == (name in self._stage.own_names)
            for name, weight in self.network.named_parameters()
        )

    @property
    def is_last(self) -> bool:
        """True in the process of the last stage, which computes the network's outputs."""
        return self._index == self.model_parallel - 1

    @property
    def _index(self) -> int:
        """The index of this process's stage in the pipeline."""
        return self.copy_mesh.get_local_rank()

    def divide(self, network: Network) -> None:
        self._stage = Stage(network, self._index, self.model_parallel)
        for name, weight in network.named_parameters():
            if name in self._stage.own_names:
                weight.data = weight.data.clone()
            else:
                empty_weight(weight)
            if network.mapped:
                network.mapped.release()

    def train_batch(self, rows: Tensor, loss: LossOfRows) -> None:
        """Run forward and backward passes of rows (B, ...), and accumulate the gradients.

        Only the last stage calls `loss`.
        """
        self._loss = loss
        schedule = self._schedule(len(rows) // self._num_micro_batches, trains=True)
        first = (rows,) if self._index == 0 else ()
        places = torch.arange(len(rows), device=rows.device) if self.is_last else None
        schedule.step(*first, target=places, return_outputs=False, rows=rows)

    def answers(self, rows: Tensor) -> Tensor:
        """Run a forward pass of rows (B, ...) through all stages; return the outputs (B, K).

        The result is zeros in all stages except the last one.
        """
        schedule = self._schedule(len(rows), trains=False)
        found = schedule.step(*((rows,) if self._index == 0 else ()), rows=rows)
        if self.is_last:
            answers: Tensor = found
            return answers
        return torch.zeros(len(rows), self.network.spec.num_outputs, device=rows.device)

    def from_last(self, value: Tensor) -> Tensor:
        """Broadcast `value` of the last stage to all processes of the copy, and return it."""
        value, group = value.detach().clone(), self.copy_mesh.get_group()
        distributed.broadcast(value, group=group, group_src=self.model_parallel - 1)
        return value

    def norm(self, own: Tensor) -> Tensor:
        """Combine the gradient norms () of the stages to the norm over all stages, ()."""
        total = own.square()
        distributed.all_reduce(total, group=self.copy_mesh.get_group())
        return total.sqrt()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint in torch.save's format; each process writes its own tensors."""
        owners: dict[str, int] = {}
        described = gather_objects(_described(checkpoint))
        whole = described[0]
        for rank, other in enumerate(described):
            whole = _merged(whole, other, rank, owners, "")
        places: list[Any] = [{}]
        if self.is_global_zero:
            leaves, _ = tree_flatten_with_path(whole)
            names = [keystr(path) for path, leaf in leaves if isinstance(leaf, Tensor)]
            places = [dict(zip(names, save_without_data(whole, filepath), strict=True))]
        distributed.broadcast_object_list(places, src=0)
        with open(filepath, "r+b") as file:
            for path, leaf in tree_flatten_with_path(checkpoint)[0]:
                name = keystr(path)
                if isinstance(leaf, Tensor) and owners.get(name, 0) == self.global_rank:
                    file.seek(places[0][name])
                    value = leaf.detach().cpu().contiguous()
                    file.write(value.reshape(-1).view(torch.uint8).numpy().data)

    def _mean_loss(self, answers: Tensor, places: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(answers, places)

    def _schedule(self, rows: int, *, trains: bool) -> Any:
        assert self._stage is not None
        first_learning = self._stage.first_learning() if trains else 0
        key = (rows, trains, first_learning)
        if key not in self._schedules:
            stage = PipelineStage(
                self._stage,
                self._index,
                self.model_parallel,
                self.root_device,
                *self._stage.examples(rows, first_learning),
                group=self.copy_mesh.get_group(),
            )
            self._schedules[key] = (
                Schedule1F1B(stage, self._num_micro_batches, self._mean_loss)
                if trains
                else ScheduleGPipe(stage, 1)
            )
        return self._schedules[key]


def empty_weight(weight: nn.Parameter) -> None:
    """Replace the data of a weight that another process holds by an empty tensor."""
    weight.data = weight.data.new_empty((0, *weight.shape[1:]))


class Stage(nn.Module):
    """One pipeline stage: consecutive blocks, the embedding if first, and the head if last."""

    def __init__(self, network: Network, index: int, num_stages: int) -> None:
        super().__init__()
        self._network: Any = network
        self._is_first, self._is_last = index == 0, index == num_stages - 1
        backbone: Any = network.backbone
        self._backbone: Any = backbone
        self._blocks = blocks_of_stage(network, index, num_stages)
        self._num_blocks = len(parallel_blocks(network))
        self._place, self._num_stages = index, num_stages
        names = [weights_of_stage(network, place, num_stages) for place in range(num_stages)]
        self.own_names, self._names = names[index], names
        mode = active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.no_grad():
            values = backbone.before_blocks(network.backbone_inputs(example_rows(network.spec)))
        self._shape, self._dtype = tuple(values.shape[1:]), values.dtype

    def forward(self, values: Tensor, rows: Tensor) -> Tensor:
        """Run this stage on activations (B, ...), or on rows of the store in the first stage.

        Returns activations (B, ...), or in the last stage the network's outputs (B, K) float32.
        """
        inputs = self._network.backbone_inputs(rows)
        values = self._backbone.before_blocks(inputs) if self._is_first else values
        further = block_arguments(self._backbone, inputs, self._num_blocks)
        own = further[_places(self._num_blocks, self._place, self._num_stages)]
        for block, arguments in zip(self._blocks, own, strict=True):
            values = block(values, *arguments)
        if not self._is_last:
            # The next stage expects one dtype, which autocast may have narrowed.
            return values.to(self._dtype).contiguous()
        answers: Tensor = self._network.to_target_unit(self._backbone.after_blocks(values, inputs))
        return answers.to(torch.float32)

    def first_learning(self) -> int:
        """Return the index of the first stage that has a weight which is not frozen."""
        learning = {name for name, one in self._network.named_parameters() if one.requires_grad}
        return next((place for place, own in enumerate(self._names) if own & learning), 0)

    def examples(self, rows: int, first_learning: int = 0) -> tuple[Tensor, Tensor]:
        """Return meta tensors like this stage's input and output for `rows` rows.

        Activations from stages before `first_learning` need no gradient.
        """
        values = torch.empty(rows, *self._shape, dtype=self._dtype, device="meta")
        passed_on = values.detach().requires_grad_(self._place >= first_learning)
        values.requires_grad_(self._place > first_learning)
        inputs = example_rows(self._network.spec, rows).to("meta") if self._is_first else values
        answers = torch.empty(rows, self._network.spec.num_outputs, device="meta")
        return inputs, answers.requires_grad_() if self._is_last else passed_on


def _described(value: Any) -> Any:
    """Replace all tensors in a nested value by meta tensors, which hold no data."""
    if isinstance(value, dict):
        return {key: _described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_described(item) for item in value)
    return value.detach().to("meta") if isinstance(value, Tensor) else value


def _merged(whole: Any, other: Any, rank: int, owners: dict[str, int], path: str) -> Any:
    """Merge the state `other` of `rank` into `whole`.

    Adds the keys and the nonempty tensors that `whole` lacks, and records in `owners` the rank that
    holds the tensor at each path.
    """
    if isinstance(whole, dict) and isinstance(other, dict):
        merged = dict(whole)
        for key, item in other.items():
            place = f"{path}[{key!r}]"
            if key not in merged:
                owners |= {
                    place + keystr(inner): rank for inner, _ in tree_flatten_with_path(item)[0]
                }
                merged[key] = item
            else:
                merged[key] = _merged(merged[key], item, rank, owners, place)
        return merged
    if isinstance(whole, list) and isinstance(other, list):
        return [
            _merged(own, item, rank, owners, f"{path}[{index}]")
            for index, (own, item) in enumerate(zip(whole, other, strict=True))
        ]
    if isinstance(whole, Tensor) and isinstance(other, Tensor) and other.numel() > whole.numel():
        owners[path] = rank
        return other
    return whole
