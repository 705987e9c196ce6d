"""What each process of a training has for itself, and the trainer's state, which rank 0 writes, lacks.

Running statistics of BatchNorm, and their averages, differ between processes until an epoch ends, and each adds up losses of its own rows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from slipway.system import files
from slipway.training.module import TrainingModule
from slipway.training.recipe.weight_average import WeightAverage

_BUFFER, _AVERAGE, _SUM = "buffer.", "average.", "sum."


def write_rank_state(
    module: TrainingModule, averages: Sequence[WeightAverage], rank: int, folder: Path
) -> None:
    """Write `rank-NNNNN.safetensors`: every buffer of the module, the averages of them, and its sums of the epoch."""
    tensors = {_BUFFER + name: value for name, value in module.named_buffers()}
    tensors |= {
        _AVERAGE + name: value for average in averages for name, value in average.buffers().items()
    }
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
    """Give the module and its averages what `rank` had. Of another number of processes: the mean of their buffers, all sums to rank 0."""
    if world_size == saved_world_size:
        tensors = safetensors.torch.load(_path(folder, rank).read_bytes())
    else:
        tensors = _merged(
            [
                safetensors.torch.load(_path(folder, other).read_bytes())
                for other in range(saved_world_size)
            ],
            rank,
        )
    _copy(tensors, _BUFFER, dict(module.named_buffers()))
    for average in averages:
        _copy(tensors, _AVERAGE, average.buffers())
    sums = {
        name.removeprefix(_SUM): value.to(module.device)
        for name, value in tensors.items()
        if name.startswith(_SUM)
    }
    module.train_sums.totals = sums


def _copy(tensors: Mapping[str, Tensor], prefix: str, targets: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        if name.startswith(prefix):
            targets[name.removeprefix(prefix)].copy_(value)


def _merged(ranks: list[Mapping[str, Tensor]], rank: int) -> dict[str, Tensor]:
    merged = {}
    for name, value in ranks[0].items():
        values = torch.stack([tensors[name] for tensors in ranks])
        if name.startswith(_SUM):
            merged[name] = values.sum(dim=0) if rank == 0 else torch.zeros_like(value)
        else:
            merged[name] = (
                values.double().mean(dim=0).to(value.dtype) if value.is_floating_point() else value
            )
    return merged


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"
