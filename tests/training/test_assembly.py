"""Tests of the trainer arguments that follow from params.yaml."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from slipway.training.assembly import step_arguments
from slipway.training.batches.batches import cut_step
from slipway.training.distributed.placement import TrainingHost, place
from tests.project_params import PROJECT

NO_GPU = TrainingHost(num_gpus=0, has_bfloat16=True, launch=None)


@pytest.fixture(autouse=True)
def _unchanged_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which Lightning sets otherwise
    was = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    yield
    torch.use_deterministic_algorithms(was[0], warn_only=was[1])


@pytest.mark.parametrize(
    ("deterministic", "enabled", "only_warns"),
    [("warn", True, True), (True, True, False), (False, False, False)],
)
def test_the_setting_deterministic_decides_which_kernels_torch_may_use(
    tmp_path: Path, deterministic: Any, enabled: bool, only_warns: bool
) -> None:
    params = PROJECT.train.model_copy(update={"deterministic": deterministic})
    shape = cut_step(params.batch_size, 1, params.max_batch_per_device)
    pl.Trainer(**step_arguments(params, place(params, NO_GPU), shape, tmp_path), logger=False)
    assert torch.are_deterministic_algorithms_enabled() is enabled
    assert torch.is_deterministic_algorithms_warn_only_enabled() is only_warns


@pytest.mark.parametrize(("network", "may_skip"), [("nets:Net", True), ("small_resnet", False)])
def test_ddp_allows_only_a_user_network_to_skip_a_layer(
    tmp_path: Path, network: str, may_skip: bool
) -> None:
    changes = {"network": network, "strategy": "ddp", "devices": 2}
    params = PROJECT.train.model_copy(update=changes)
    shape = cut_step(params.batch_size, 2, params.max_batch_per_device)
    arguments = step_arguments(params, place(params, NO_GPU), shape, tmp_path)
    assert arguments["strategy"]._ddp_kwargs["find_unused_parameters"] is may_skip
