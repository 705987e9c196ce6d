import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy

from slipway.training.assembly import prepare_process
from slipway.training.distributed.placement import Placement, PrecisionName
from slipway.training.distributed.strategies import trainer_arguments
from slipway.training.networks.networks import Network, build_network
from slipway.training.recipe.precision import adapt_to_half
from tests.project_params import PROJECT
from tests.training.conftest import CONTRACT, spec, write_project
from tests.training.real_runs import run_training

# Attention masks and rotary tables are buffers in float32.
WITH_BUFFERS = [
    (
        "timm/swin_tiny_patch4_window7_224",
        {"img_size": 56, "depths": [2, 2], "embed_dim": 24, "num_heads": [1, 2]},
        56,
    ),
    ("timm/eva02_tiny_patch14_224", {"img_size": 28, "depth": 2, "embed_dim": 96}, 28),
]

MODULE = "tests.training.typed_training"


def _network(name: str, arguments: dict[str, Any], size_px: int) -> Network:
    torch.manual_seed(0)
    return build_network(
        spec(name=name, arguments=arguments, input=CONTRACT.model_copy(update={"size_px": size_px}))
    )


def _cast_parameters(network: Network, dtype: torch.dtype) -> None:
    """Cast only the parameters and no buffers, as DeepSpeed does."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)


@pytest.mark.parametrize(("name", "arguments", "size_px"), WITH_BUFFERS)
def test_a_network_with_derived_buffers_runs_in_half_precision(
    name: str, arguments: dict[str, Any], size_px: int
) -> None:
    network, images = (
        _network(name, arguments, size_px),
        torch.randint(0, 256, (2, size_px, size_px, 1), dtype=torch.uint8),
    )
    with torch.no_grad():
        exact = network.eval()(images)
        adapt_to_half(network, torch.bfloat16)
        _cast_parameters(network, torch.bfloat16)
        answers = network(images)
    assert answers.dtype == torch.bfloat16
    assert torch.allclose(answers.float(), exact, atol=0.05)


@pytest.mark.parametrize(("name", "arguments", "size_px"), WITH_BUFFERS)
def test_a_network_without_the_adaptation_fails_in_half_precision(
    name: str, arguments: dict[str, Any], size_px: int
) -> None:
    network = _network(name, arguments, size_px)
    _cast_parameters(network, torch.bfloat16)
    with pytest.raises(RuntimeError):
        network(torch.zeros(2, size_px, size_px, 1, dtype=torch.uint8))


def test_saved_weights_stay_float32_in_half_precision() -> None:
    network = build_network(spec())
    adapt_to_half(network, torch.float16)
    assert {value.dtype for value in network.state_dict().values()} == {torch.float32, torch.int64}
    assert network.pixel_mean.dtype == torch.float32


@pytest.mark.parametrize(("precision", "allowed"), [("32-true", False), ("16-mixed", True)])
def test_precision_32_true_does_not_use_tf32(
    monkeypatch: pytest.MonkeyPatch, precision: PrecisionName, allowed: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    prepare_process(
        PROJECT.train,
        Placement("single", precision, "gpu", 1, 1, None, None, ()),
        build_network(spec()),
    )
    assert torch.backends.cudnn.allow_tf32 is allowed


def test_ddp_leaves_running_statistics_to_each_rank_until_they_are_averaged() -> None:
    strategy = trainer_arguments(Placement("ddp", "32-true", "cpu", 2, 1, None, None, ()), 16)[
        "strategy"
    ]
    assert isinstance(strategy, DDPStrategy)
    assert strategy._ddp_kwargs == {"broadcast_buffers": False, "find_unused_parameters": False}


@pytest.mark.process
@pytest.mark.parametrize(
    ("strategy", "precision", "computed", "weights"),
    [
        ("single", "bf16-mixed", "bfloat16", "float32"),
        ("ddp", "bf16-mixed", "bfloat16", "float32"),
        pytest.param("single", "32-true", "float32", "float32", marks=pytest.mark.nightly),
        pytest.param(
            "deepspeed_stage_2", "bf16-mixed", "bfloat16", "bfloat16", marks=pytest.mark.nightly
        ),
        pytest.param(
            "deepspeed_stage_2", "16-mixed", "float16", "float16", marks=pytest.mark.nightly
        ),
    ],
)
def test_each_process_computes_in_the_requested_precision(
    tmp_path: Path, strategy: str, precision: str, computed: str, weights: str
) -> None:
    devices = 1 if strategy == "single" else 2
    done = run_training(
        write_project(tmp_path, strategy=strategy, precision=precision, devices=devices, epochs=2),
        MODULE,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"^typed rank (\d): computed {(.*)}, weights {(.*)}, loss torch.float32$",
        done.stdout,
        re.MULTILINE,
    )
    assert sorted(found) == [
        (str(rank), f"torch.{computed}", f"torch.{weights}") for rank in range(devices)
    ]
