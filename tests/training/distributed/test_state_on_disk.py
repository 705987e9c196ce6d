"""Tests of the optimizer's state on disk: the same bits, no files left, refusals."""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipway.system.errors import ParamsError, TrainingError
from slipway.training.distributed.state_on_disk import StateOnDisk, check_offload_path

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
    "plain": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.0),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_on_disk_ends_with_the_same_bits_also_when_it_is_loaded(
    tmp_path: Path, make: MakeOptimizer
) -> None:
    in_memory, on_disk = _weights(), _weights()
    optimizer, resumed = make(in_memory), _weights()
    _steps(in_memory, optimizer, range(6))

    optimizer = make(on_disk)
    StateOnDisk(tmp_path, on_disk, optimizer)
    _steps(on_disk, optimizer, range(3))
    num_tensors = 1 + sum(value.ndim for value in _tensors(optimizer.state[on_disk[0]]))
    assert _num_mapped(tmp_path) == 2 * num_tensors
    saved = io.BytesIO()
    torch.save([optimizer.state_dict(), [weight.detach() for weight in on_disk]], saved)
    saved.seek(0)

    optimizer = make(resumed)
    StateOnDisk(tmp_path, resumed, optimizer)
    state, values = torch.load(saved, weights_only=True)
    optimizer.load_state_dict(state)
    for weight, value in zip(resumed, values, strict=True):
        weight.data.copy_(value)
    before = [value.data_ptr() for value in _tensors(optimizer.state[resumed[0]])]
    _steps(resumed, optimizer, range(3, 6))
    assert [value.data_ptr() for value in _tensors(optimizer.state[resumed[0]])] == before
    # Only the weights are left of the first optimizer's.
    assert _num_mapped(tmp_path) == 2 * num_tensors + len(on_disk)
    assert all(torch.equal(*pair) for pair in zip(in_memory, resumed, strict=True))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    weights = _weights()
    with pytest.raises(TrainingError, match="No space left") as raised:
        StateOnDisk(tmp_path, weights, OPTIMIZERS["adamw"](weights))
    assert "This process needs 49.2 kB there, and " in str(raised.value)
    assert "Free space there, name a folder on a larger disk, or use" in str(raised.value)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(ParamsError, match=r"is no folder\. Expected an existing folder"):
            check_offload_path(str(tmp_path / name))
    check_offload_path(str(tmp_path))
    check_offload_path(None)


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ParamsError, match=r"cannot be written: .* correct its rights"):
        check_offload_path("/proc/self")


def _weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(2048, generator=generator)) for _ in range(2)]


def _steps(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for index, weight in enumerate(weights):
            generator = torch.Generator().manual_seed(10 * step + index)
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor) and value.ndim]


def _num_mapped(folder: Path) -> int:
    """Count the files of `folder` that this process has mapped."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())
