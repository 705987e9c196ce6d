"""Keeps the optimizer's state of a process in a folder on disk: `train.offload_path`.

Each tensor is mapped to a file of its own, so the kernel writes it there and frees its memory when
memory is short, and reads it again when it is used. The files have no name: the kernel removes them
when the process ends, however it ends. Checkpoints hold the state as without this.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipway.reports.console import size
from slipway.system.errors import ParamsError, TrainingError


class StateOnDisk:
    """Moves float32 weights and the optimizer's tensors of the same shape to a folder."""

    def __init__(self, folder: Path, weights: Sequence[Tensor], optimizer: Any) -> None:
        """Move `weights` now, and each tensor of the torch optimizer once it exists.

        Room for all of them is allocated now: raises TrainingError if the disk has less.
        """
        names = _state_names(optimizer)
        needed = (1 + len(names)) * sum(weight.nbytes for weight in weights)
        self._mapped: dict[Tensor, dict[str, Tensor]] = {}
        try:
            for weight in weights:
                mapped = _mapped_like(weight, folder)
                mapped.copy_(weight.detach())
                weight.data = mapped
                self._mapped[weight] = {name: _mapped_like(weight, folder) for name in names}
        except OSError as error:
            free = size(shutil.disk_usage(folder).free)
            raise TrainingError(
                f"the optimizer's state cannot be kept in train.offload_path, {folder}: {error}. "
                f"This process needs {size(needed)} there, and {free} are free now. "
                "Free space there, name a folder on a larger disk, or use more processes."
            ) from error
        optimizer.register_step_post_hook(self._move)
        optimizer.register_load_state_dict_post_hook(self._move)

    def _move(self, optimizer: Any, *_: Any) -> None:
        """Copy tensors that the optimizer has made or loaded since to their files."""
        for weight, mapped in self._mapped.items():
            state = optimizer.state.get(weight, {})
            for name, file in mapped.items():
                value = state.get(name)
                if value is not None and value is not file:
                    state[name] = file.copy_(value)


def check_offload_path(path: str | None) -> None:
    """Raise ParamsError if `train.offload_path` is no folder in which files can be written."""
    if path is None:
        return
    folder = Path(path)
    problem = "" if folder.is_dir() else "is no folder"
    if not problem:
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            problem = f"cannot be written: {error}"
    if problem:
        raise ParamsError(
            f"train.offload_path is {path!r}, which {problem}. Expected an existing folder on a "
            "local disk of each machine. Create it, correct its rights, or use null."
        )


def _state_names(optimizer: Any) -> list[str]:
    """Return the names of the tensors that the optimizer keeps for each weight.

    They are read off a step of a further optimizer of the same class and settings.
    """
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    probe = type(optimizer)([weight])
    probe.param_groups[0] |= {**optimizer.param_groups[0], "params": [weight]}
    probe.step()
    state = probe.state[weight]
    return [name for name, value in state.items() if isinstance(value, Tensor) and value.ndim]


def _mapped_like(tensor: Tensor, folder: Path) -> Tensor:
    """Return zeros of the shape and dtype of `tensor` in a nameless file of `folder`.

    Raises OSError if the disk has too little room, here rather than when it is written.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
        pages = mmap.mmap(file.fileno(), tensor.nbytes)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
