"""Tests of the state of each rank: buffers are restored by name, other names are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slipway.system.errors import TrainingError
from slipway.training.checkpoints.rank_state import (
    check_names,
    restore_rank_state,
    write_rank_state,
)

pytestmark = pytest.mark.unit


class Module(nn.Module):
    """A module with buffers of the given names, and with the sums of an epoch."""

    def __init__(self, *names: str, value: float) -> None:
        super().__init__()
        for name in names:
            self.register_buffer(name, torch.full((3,), value))
        self.train_sums: Any = SimpleNamespace(totals={"loss": torch.tensor(value)})
        self.device = torch.device("cpu")


def restored(folder: Path, module: Module) -> None:
    write_rank_state(Module("mean", "cache", value=2.0), [], 0, folder)  # type: ignore[arg-type]
    restore_rank_state(module, [], 0, 1, 1, folder)  # type: ignore[arg-type]


def test_a_ranks_buffers_and_sums_are_restored_by_name(tmp_path: Path) -> None:
    module = Module("cache", "mean", value=7.0)
    restored(tmp_path, module)
    assert module.state_dict()["mean"].tolist() == [2.0, 2.0, 2.0]
    assert module.train_sums.totals["loss"] == 2.0


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["mean"], r"\(only in the checkpoint: cache\)"),
        (["mean", "cache", "table"], r"\(only in the network: table\)"),
        (["mean", "table"], r"\(only in the checkpoint: cache; only in the network: table\)"),
    ],
)
def test_a_network_with_other_buffers_is_refused_by_name_and_unchanged(
    tmp_path: Path, names: list[str], found: str
) -> None:
    module = Module(*names, value=7.0)
    with pytest.raises(TrainingError, match=found + r"\. Expected .* Create every weight"):
        restored(tmp_path, module)
    assert all(value.eq(7.0).all() for value in module.buffers())


def test_equal_names_of_buffers_in_another_order_are_accepted() -> None:
    check_names(["a", "b"], {"b": 1, "a": 2})
