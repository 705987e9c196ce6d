"""Merges the training states of all processes into one state by name, for any strategy."""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.serialization import config as torch_loading

from slipway.training.checkpoints.rank_state import check_names
from slipway.training.networks.networks import Network
from slipway.training.recipe.weight_average import AVERAGE_KEY, averaged_weights

_PREFIX = "network."  # prefix of the weights inside the Lightning module
_SHARDS = "checkpoint"  # the folder in which DeepSpeed writes its shards
_LOADED_TOGETHER = 8  # weights, about half of those of a block


@dataclass(frozen=True)
class ConsolidatedState:
    """Everything that the next training step depends on, except the state of `rank_state`.

    Tensors are named as in the Lightning module.
    """

    # Float32, and buffers. `contiguous()` returns the tensor: of ZeRO-3 it is merged only then.
    weights: dict[str, Any]
    # States by name of the weight, then of the state: in the shape of the weight, or ().
    optimizer: dict[str, dict[str, Any]]
    rest: dict[str, Any]  # schedules and callbacks, as the trainer saved them


def consolidated_weights(state: Path) -> dict[str, Any]:
    """Return the float32 weights in a trainer's state, or their average if it has one.

    `contiguous()` returns the tensor. `state` must have been verified before.
    """
    if state.is_dir():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with _quietly_mapped():
            weights = get_fp32_state_dict_from_zero_checkpoint(
                str(state), tag=_SHARDS, lazy_mode=True
            )
            weights = _with_frozen(weights, state / _SHARDS)
    else:
        weights = _read(state)["state_dict"]
    return network_weights(weights) | averaged_weights(state)


def load_weights(network: Network, weights: Mapping[str, Any]) -> None:
    """Load consolidated weights, a few at a time because ZeRO-3 merges them when they are read.

    Raises TrainingError if the network has other weights.
    """
    check_names(weights, network.state_dict())
    rest = iter(weights.items())
    while some := list(islice(rest, _LOADED_TOGETHER)):
        network.load_state_dict({name: value.contiguous() for name, value in some}, strict=False)


def network_weights(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights that belong to the network, named as in the network."""
    return {
        name.removeprefix(_PREFIX): value
        for name, value in weights.items()
        if name.startswith(_PREFIX)
    }


def consolidated_state(state: Path) -> ConsolidatedState:
    """Read a verified trainer state and return it merged over all processes."""
    return _from_shards(state / _SHARDS) if state.is_dir() else _from_file(state)


def _from_file(path: Path) -> ConsolidatedState:
    saved = _read(path)
    weights, optimizer = saved.pop("state_dict"), saved.pop("optimizer_states")[0]
    names = saved["optimizer_names"]  # see `TrainingModule.on_save_checkpoint`
    by_name = {names[index]: _tensors(state) for index, state in optimizer["state"].items()}
    return ConsolidatedState(weights, by_name, saved)


def _read(path: Path) -> dict[str, Any]:
    """Load a checkpoint file memory-mapped: a tensor is read from disk only when it is used."""
    saved: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return saved


def _from_shards(folder: Path) -> ConsolidatedState:
    """Merge the shards that DeepSpeed wrote in `folder` into one state.

    DeepSpeed's function merges only weights. The optimizer's states have the same layout, so it is
    called once more for each state, in place of the weights.
    """
    from deepspeed.utils import zero_to_fp32

    with _quietly_mapped():
        model_files = zero_to_fp32.get_model_state_files(str(folder))
        models = zero_to_fp32.parse_model_states(model_files)
        shards = zero_to_fp32.get_optim_files(str(folder))
        stage, world_size, flat, paddings = zero_to_fp32.parse_optim_states(shards, str(folder))
        merge: Callable[..., dict[str, Any]] = partial(
            zero_to_fp32._get_fp32_state_dict_from_zero2_checkpoint,
            param_alignment_paddings=paddings,
        )
        if stage == 3:
            merge = zero_to_fp32._get_fp32_state_dict_from_zero3_checkpoint
        weights = merge(world_size, flat, models, False)
        states = [_flat_states(Path(shard)) for shard in shards]
        trained = {name for shapes in models[0].param_shapes for name in shapes}
        merged = {}
        for key, value in (states[0][0] if states[0] else {}).items():
            parts = [  # without the padding of the last partition
                [state[key][: len(part)] for state, part in zip(*rank, strict=True)]
                for rank in zip(states, flat, strict=True)
                if value.ndim
            ]
            merged[key] = (
                merge(world_size, parts, models, True)
                if parts
                else {name: value.clone() for name in trained}
            )
        saved = _load_shard(Path(model_files[0]))
        weights = _with_frozen(weights, folder)
    rest = {key: saved[key] for key in ("lr_schedulers", "callbacks", "guard")}
    if average := averaged_weights(folder.parent):
        rest["callbacks"][AVERAGE_KEY]["values"] = average
    optimizer = {name: {key: whole[name] for key, whole in merged.items()} for name in trained}
    return ConsolidatedState(weights, optimizer, rest)


def _with_frozen(weights: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add the frozen weights, which DeepSpeed 0.19 leaves out of the shards of ZeRO-1."""
    from deepspeed.utils.zero_to_fp32 import get_model_state_files

    whole: dict[str, Any] = _load_shard(Path(get_model_state_files(str(folder))[0]))["module"]
    # ZeRO-3 has empty tensors here, and parts in the shards.
    return {name: value for name, value in whole.items() if value.numel()} | weights


@contextmanager
def _quietly_mapped() -> Iterator[None]:
    """Map files that DeepSpeed loads into memory, and hide the messages that it prints."""
    mapped = torch_loading.patch({"load.mmap": True})  # type: ignore[attr-defined]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), mapped:
        yield


def _flat_states(shard: Path) -> list[dict[str, Tensor]]:
    """Return one rank's optimizer states as flat tensors, a dictionary per parameter group."""
    saved = _load_shard(shard)["optimizer_state_dict"]
    state = (saved.get("base_optimizer_state") or saved["optimizer_state_dict"])["state"]
    return [_tensors(state[group]) for group in sorted(state)]


def _load_shard(shard: Path) -> dict[str, Any]:
    """Load a shard without running code from it; only listed DeepSpeed classes are allowed."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    allowed = [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]
    with torch.serialization.safe_globals(allowed):
        loaded: dict[str, Any] = torch.load(shard, map_location="cpu", weights_only=True)
    return loaded


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}
