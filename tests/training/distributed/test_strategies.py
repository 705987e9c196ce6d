import inspect
from typing import Any

import pytest
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy

from slipway.artifacts.training_setup import TrainingSetup
from slipway.config.params import load_params
from slipway.system.errors import TrainingError
from slipway.training.distributed.placement import TrainingHost, place
from slipway.training.distributed.strategies import check_actual
from tests.training.conftest import ROOT


def _expected(**changes: Any) -> TrainingSetup:
    """Return the setup that two processes with ZeRO-2 on the CPU request."""
    two = {"strategy": "deepspeed_stage_2", "accelerator": "cpu", "devices": 2, "num_nodes": 1}
    params = load_params(ROOT / "params.yaml").train.model_copy(update=two | changes)
    return place(params, TrainingHost(num_gpus=0, has_bfloat16=True, launch=None)).expected


def test_a_difference_between_requested_and_actual_setup_ends_the_run() -> None:
    expected = _expected(precision="16-mixed", offload=None)
    with pytest.raises(TrainingError, match="precision: requested 16-mixed, actual bf16-mixed"):
        check_actual(expected, expected.model_copy(update={"precision": "bf16-mixed"}))
    check_actual(expected, expected)


def test_a_run_without_its_requested_offload_ends() -> None:
    expected = _expected(precision="32-true", offload="optimizer")
    with pytest.raises(TrainingError, match="offload: requested optimizer, actual null"):
        check_actual(expected, expected.model_copy(update={"offload": None}))


@pytest.mark.parametrize(
    "method",
    ["setup_environment", "setup_distributed", "_init_deepspeed_distributed", "set_world_ranks"],
)
def test_lightning_still_has_the_methods_that_the_portable_strategy_overrides(method: str) -> None:
    assert callable(getattr(DeepSpeedStrategy, method))


def test_lightning_still_refuses_the_cpu_that_our_strategy_allows() -> None:
    assert "CUDAAccelerator" in inspect.getsource(DeepSpeedStrategy.setup_environment)
    assert "_validate_device_index_selection" in inspect.getsource(
        DeepSpeedStrategy.setup_distributed
    )
    assert issubclass(DeepSpeedStrategy, DDPStrategy)
