"""State of each rank that differs from the state of rank 0, which the trainer saves.

BatchNorm's running statistics and their averages differ between ranks until an epoch ends, and
each rank sums the losses of its own rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from slipway.system import files
from slipway.system.errors import TrainingError
from slipway.training.module import TrainingModule
from slipway.training.recipe.weight_average import WeightAverage

_BUFFER, _AVERAGE, _SUM = "buffer.", "average.", "sum."


def write_rank_state(
    module: TrainingModule, averages: Sequence[WeightAverage], rank: int, folder: Path
) -> None:
    """Write one rank's buffers, their averages and its epoch sums to `rank-NNNNN.safetensors`."""
    tensors = {_BUFFER + name: value for name, value in module.named_buffers()}
    for average in averages:
        tensors |= {_AVERAGE + name: value for name, value in average.buffers().items()}
    tensors |= {_SUM + name: value for name, value in module.train_sums.totals.items()}
    payload = safetensors.torch.save(
        {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    )
    files.write_bytes(_path(folder, rank), payload)


def restore_rank_state(
    module: TrainingModule,
    averages: Sequence[WeightAverage],
    rank: int,
    world_size: int,
    saved_world_size: int,
    folder: Path,
) -> None:
    """Restore the buffers, their averages and the epoch sums of `rank`.

    If the number of ranks has changed, every rank gets the mean of all buffers, and rank 0 gets all
    sums.
    """
    if world_size == saved_world_size:
        tensors = _read(folder, rank)
    else:
        tensors = _merge([_read(folder, other) for other in range(saved_world_size)], rank)
    _copy(tensors, _BUFFER, dict(module.named_buffers()))
    for average in averages:
        _copy(tensors, _AVERAGE, average.buffers())
    module.train_sums.totals = {
        name.removeprefix(_SUM): value.to(module.device)
        for name, value in tensors.items()
        if name.startswith(_SUM)
    }


def check_names(saved: Iterable[str], current: Iterable[str]) -> None:
    """Raise a TrainingError if a checkpoint and the network name different weights or buffers."""
    only_saved, only_current = set(saved) - set(current), set(current) - set(saved)
    if not only_saved | only_current:
        return
    parts = {"only in the checkpoint": only_saved, "only in the network": only_current}
    found = "; ".join(
        f"{where}: {', '.join(sorted(names))}" for where, names in parts.items() if names
    )
    raise TrainingError(
        f"the checkpoint and the network have different weights or buffers ({found}). Expected the "
        "same names under every strategy and from the first step on. Create every weight and "
        "buffer in the network's __init__, not in its forward pass; then train from the start."
    )


def _copy(tensors: Mapping[str, Tensor], prefix: str, targets: Mapping[str, Tensor]) -> None:
    saved = {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
    check_names(saved, targets)
    for name, value in saved.items():
        targets[name].copy_(value)


def _merge(ranks: list[dict[str, Tensor]], rank: int) -> dict[str, Tensor]:
    merged = {}
    for name, value in ranks[0].items():
        values = torch.stack([tensors[name] for tensors in ranks])
        if name.startswith(_SUM):
            merged[name] = values.sum(dim=0) if rank == 0 else torch.zeros_like(value)
        elif value.is_floating_point():
            merged[name] = values.double().mean(dim=0).to(value.dtype)
        else:
            merged[name] = value
    return merged


def _read(folder: Path, rank: int) -> dict[str, Tensor]:
    return safetensors.torch.load(_path(folder, rank).read_bytes())


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"
