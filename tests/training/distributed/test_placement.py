import dataclasses
from typing import Any

import pytest

from slipway.config.params import load_params
from slipway.config.training import TrainParams
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.distributed.launchers import Launch
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.recipe.optimizers import fuses_optimizer
from tests.training.conftest import ROOT

NO_GPU = TrainingHost(num_gpus=0, has_bfloat16=True, launch=None)
TWO_GPUS = TrainingHost(num_gpus=2, has_bfloat16=True, launch=None)
OLD_GPU = TrainingHost(num_gpus=1, has_bfloat16=False, launch=None)
TORCHRUN = TrainingHost(
    num_gpus=0, has_bfloat16=True, launch=Launch("torchrun", 0, 0, 2, 1, "127.0.0.1", 15000)
)
SLURM = TrainingHost(
    num_gpus=0, has_bfloat16=True, launch=Launch("Slurm", 5, 1, 2, 3, "node1", 15000)
)


def _params(**changes: Any) -> TrainParams:
    auto = {
        "strategy": "auto",
        "precision": "auto",
        "accelerator": "auto",
        "offload": None,
        "devices": "auto",
        "num_nodes": 1,
        "model_parallel": None,
    }
    return load_params(ROOT / "params.yaml").train.model_copy(update={**auto, **changes})


@pytest.mark.parametrize(
    ("host", "changes", "expected"),
    [
        (NO_GPU, {}, ("single", "32-true", "cpu", 1)),
        (NO_GPU, {"devices": 2}, ("ddp", "32-true", "cpu", 2)),
        (TORCHRUN, {}, ("ddp", "32-true", "cpu", 2)),
        (SLURM, {"num_nodes": 3}, ("ddp", "32-true", "cpu", 6)),
        (TWO_GPUS, {}, ("deepspeed_stage_2", "16-mixed", "gpu", 2)),
        (TWO_GPUS, {"accelerator": "cpu"}, ("single", "32-true", "cpu", 1)),
        (TWO_GPUS, {"strategy": "single"}, ("single", "bf16-mixed", "gpu", 1)),
        (TWO_GPUS, {"devices": 1}, ("single", "bf16-mixed", "gpu", 1)),
        (TWO_GPUS, {"num_nodes": 1, "strategy": "ddp"}, ("ddp", "16-mixed", "gpu", 2)),
        (OLD_GPU, {}, ("single", "16-mixed", "gpu", 1)),
        (NO_GPU, {"devices": 2, "strategy": "fsdp"}, ("fsdp", "32-true", "cpu", 2)),
        (TWO_GPUS, {"strategy": "fsdp"}, ("fsdp", "bf16-mixed", "gpu", 2)),
        (
            OLD_GPU,
            {"strategy": "tensor_parallel"},
            ("tensor_parallel", "32-true", "gpu", 1),
        ),
        (OLD_GPU, {"strategy": "fsdp"}, ("fsdp", "32-true", "gpu", 1)),
        (
            NO_GPU,
            {"strategy": "deepspeed_stage_3", "precision": "16-mixed", "devices": 2},
            ("deepspeed_stage_3", "16-mixed", "cpu", 2),
        ),
    ],
)
def test_auto_resolves_to_the_setting_for_the_hardware(
    host: TrainingHost, changes: dict[str, Any], expected: tuple[str, str, str, int]
) -> None:
    placement = place(_params(**changes), host)
    assert (
        placement.strategy,
        placement.precision,
        placement.accelerator,
        placement.world_size,
    ) == expected


@pytest.mark.parametrize(
    ("host", "changes", "is_fused"),
    [
        (NO_GPU, {}, True),
        (NO_GPU, {"devices": 2}, True),
        (NO_GPU, {"precision": "bf16-mixed"}, True),
        (NO_GPU, {"devices": 2, "strategy": "fsdp"}, False),
        (
            NO_GPU,
            {"strategy": "deepspeed_stage_3", "precision": "16-mixed", "devices": 2},
            False,
        ),
        (TWO_GPUS, {"strategy": "single"}, False),
        (OLD_GPU, {}, False),
    ],
)
def test_the_optimizer_is_fused_on_the_cpu_without_a_loss_scale(
    host: TrainingHost, changes: dict[str, Any], is_fused: bool
) -> None:
    placement = place(_params(**changes), host)
    assert fuses_optimizer(placement) is is_fused
    loss_scale = dataclasses.replace(placement, precision="16-mixed")
    assert not fuses_optimizer(loss_scale)


def test_a_resolved_auto_records_its_reasons() -> None:
    assert any("2 GPUs found" in reason for reason in place(_params(), TWO_GPUS).reasons)


def test_settings_chosen_by_the_user_have_no_recorded_reason() -> None:
    named = _params(strategy="ddp", precision="32-true", accelerator="cpu", devices=2)
    assert place(named, NO_GPU).reasons == ()


@pytest.mark.parametrize(
    ("host", "changes", "error", "text"),
    [
        (NO_GPU, {"accelerator": "gpu"}, UnavailableError, "finds no GPU"),
        (TWO_GPUS, {"devices": 3}, UnavailableError, "3 GPUs .* there are 2"),
        (NO_GPU, {"strategy": "single", "devices": 2}, ParamsError, "'single'.* make 2 processes"),
        (
            NO_GPU,
            {"precision": "16-mixed"},
            UnavailableError,
            "'16-mixed', which strategy 'single' cannot",
        ),
        (
            NO_GPU,
            {"precision": "16-mixed", "strategy": "ddp"},
            UnavailableError,
            "'16-mixed', which strategy 'ddp' cannot",
        ),
        (
            TWO_GPUS,
            {"precision": "16-mixed", "strategy": "fsdp"},
            UnavailableError,
            "'fsdp' has no loss scaling",
        ),
        (OLD_GPU, {"precision": "bf16-mixed"}, UnavailableError, "does not compute in bfloat16"),
        (
            TORCHRUN,
            {"devices": 3},
            ParamsError,
            "train.devices is 3, but torchrun started 2 processes on this node",
        ),
        (
            TORCHRUN,
            {"num_nodes": 2},
            ParamsError,
            "train.num_nodes is 2, but torchrun started processes on 1 node\\.",
        ),
        (SLURM, {}, ParamsError, "train.num_nodes is 1, but Slurm started processes on 3 nodes"),
        (
            NO_GPU,
            {"num_nodes": 2, "devices": 1},
            ParamsError,
            "train.num_nodes is 2, but no launcher started this process",
        ),
        (
            NO_GPU,
            {"strategy": "pipeline", "devices": 6, "model_parallel": 4},
            ParamsError,
            "model_parallel is 4, .* 6 processes, expected a multiple of 4.* divisor of 6",
        ),
        (
            NO_GPU,
            {"strategy": "fsdp", "devices": 6, "model_parallel": 4},
            ParamsError,
            "model_parallel is 4, .* 6 processes, expected a multiple of 4.* divisor of 6",
        ),
        (
            NO_GPU,
            {"strategy": "fsdp", "devices": 4, "model_parallel": 4},
            ParamsError,
            "is 4, the number of all processes, .* no copies .* Use strategy 'tensor_parallel'",
        ),
    ],
)
def test_impossible_strategy_precision_and_device_settings_are_refused(
    host: TrainingHost, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        place(_params(**changes), host)
