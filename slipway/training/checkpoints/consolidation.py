"""The state of a training put together from what all its processes wrote: by the names of weights, whatever the strategy was."""

import io
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipway.training.recipe.weight_average import averaged_weights

_PREFIX = "network."  # of the weights inside the Lightning module
_SHARDS = "checkpoint"  # the folder in which Lightning lets DeepSpeed put them


@dataclass(frozen=True)
class ConsolidatedState:
    """All that the next step depends on, except what `rank_state` has. Names are those of the Lightning module."""

    weights: dict[str, Tensor]  # float32, and buffers
    optimizer: dict[
        str, dict[str, Tensor]
    ]  # by the name of the weight, then by that of the state: (shape of the weight), or () for all of it
    rest: dict[str, Any]  # schedules and callbacks, as the trainer saved them


def consolidated_weights(state: Path) -> dict[str, Tensor]:
    """The network's weights in float32 by name, or their average, from a state that was verified; shards of all ranks are put together."""
    if state.is_dir():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it tells every step
            weights = get_fp32_state_dict_from_zero_checkpoint(str(state), tag=_SHARDS)
    else:
        weights = torch.load(state, map_location="cpu", weights_only=True)["state_dict"]
    return network_weights(weights) | averaged_weights(state)


def network_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the network, by its own names."""
    return {
        name.removeprefix(_PREFIX): value
        for name, value in weights.items()
        if name.startswith(_PREFIX)
    }


def consolidated_state(state: Path) -> ConsolidatedState:
    """The whole state, from one that was verified."""
    return _of_shards(state / _SHARDS) if state.is_dir() else _of_file(state)


def _of_file(state: Path) -> ConsolidatedState:
    saved = torch.load(state, map_location="cpu", weights_only=True)
    weights, optimizer = saved.pop("state_dict"), saved.pop("optimizer_states")[0]
    # The module writes down the names in the order of the optimizer's groups, see `TrainingModule.on_save_checkpoint`.
    by_name = {
        saved["optimizer_names"][index]: _tensors(state)
        for index, state in optimizer["state"].items()
    }
    return ConsolidatedState(weights, by_name, saved)


def _of_shards(folder: Path) -> ConsolidatedState:
    """DeepSpeed itself merges weights alone. The optimizer's states lie in memory as the weights do, so they are merged in their place."""
    from deepspeed.utils import zero_to_fp32

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        models = zero_to_fp32.parse_model_states(zero_to_fp32.get_model_state_files(str(folder)))
        shards = zero_to_fp32.get_optim_files(str(folder))
        stage, world_size, flat, paddings = zero_to_fp32.parse_optim_states(shards, str(folder))

        def merged(groups: list[list[Tensor]]) -> dict[str, Tensor]:
            if stage <= 2:
                tensors = zero_to_fp32._get_fp32_state_dict_from_zero2_checkpoint(
                    world_size, groups, models, False, paddings
                )
            else:
                tensors = zero_to_fp32._get_fp32_state_dict_from_zero3_checkpoint(
                    world_size, groups, models, False
                )
            return dict(zero_to_fp32.to_torch_tensor(tensors))

        weights = merged(flat)
        states = [_flat_states(Path(shard)) for shard in shards]
        trained = {name for shapes in models[0].param_shapes for name in shapes}
        optimizer: dict[str, dict[str, Tensor]] = {name: {} for name in trained}
        for key, value in (states[0][0] if states[0] else {}).items():
            if value.ndim == 0:
                whole = dict.fromkeys(trained, value)
            else:  # without what fills up the last partition
                whole = merged(
                    [
                        [state[key][: len(part)] for state, part in zip(*rank, strict=True)]
                        for rank in zip(states, flat, strict=True)
                    ]
                )
            for name in trained:
                optimizer[name][key] = whole[name].clone()
    rest = _loaded(Path(zero_to_fp32.get_model_state_files(str(folder))[0]))
    return ConsolidatedState(
        weights, optimizer, {key: rest[key] for key in ("lr_schedulers", "callbacks", "guard")}
    )


def _flat_states(shard: Path) -> list[dict[str, Tensor]]:
    """The optimizer's states of one rank by group."""
    saved = _loaded(shard)["optimizer_state_dict"]
    state = (saved.get("base_optimizer_state") or saved["optimizer_state_dict"])["state"]
    return [_tensors(state[group]) for group in sorted(state)]


def _loaded(shard: Path) -> dict[str, Any]:
    """Without running anything that the file might hold: DeepSpeed's own classes are named here."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals(
        [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]
    ):
        loaded: dict[str, Any] = torch.load(shard, map_location="cpu", weights_only=True)
    return loaded


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}
