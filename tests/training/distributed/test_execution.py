"""Tests of compilation and memory layout: they are applied or refused, and keep saved weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from slipway.config.training import TrainParams
from slipway.system.errors import ParamsError, UnavailableError
from slipway.training.distributed.execution import apply_execution, check_execution
from slipway.training.distributed.placement import Placement
from slipway.training.networks.networks import build_network
from tests.project_params import PROJECT
from tests.training.conftest import spec, write_project
from tests.training.real_runs import kill_after, run_training, weights_digest

SINGLE = Placement("single", "32-true", "cpu", 1, 1, None, None, ())
FSDP = Placement("fsdp", "32-true", "cpu", 2, 1, None, None, ())
PIPELINE = Placement("pipeline", "32-true", "cpu", 2, 1, None, None, ())
ZERO_2, ZERO_3 = (
    Placement(f"deepspeed_stage_{stage}", "32-true", "cpu", 2, 1, None, None, ())
    for stage in (2, 3)
)
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None, reason="there is no C++ compiler here"
)


def _params(**changes: Any) -> TrainParams:
    return PROJECT.train.model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "placement", "task", "text"),
    [
        ({"channels_last": True}, ZERO_2, "image_classification", "views weights as flat bytes"),
        ({"channels_last": True}, SINGLE, "table_regression", "no channels"),
        ({"compile": True}, ZERO_3, "image_classification", "gathers and frees"),
        ({"compile": True}, FSDP, "image_classification", "fsdp gathers and frees"),
        ({"compile": True}, PIPELINE, "text_classification", "exchanges values between"),
        ({"on_loss_spike": "skip"}, PIPELINE, "text_classification", "only after its gradients"),
        ({"channels_last": True}, FSDP, "image_classification", "'fsdp' views weights"),
    ],
)
def test_impossible_execution_settings_are_refused(
    changes: dict[str, Any], placement: Placement, task: Any, text: str
) -> None:
    with pytest.raises(ParamsError, match=text):
        check_execution(_params(**changes), placement, task)


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "")
    from torch._inductor import config, cpp_builder

    cpp_builder.get_cpp_compiler.cache_clear() if hasattr(
        cpp_builder.get_cpp_compiler, "cache_clear"
    ) else None
    with (
        config.patch("cpp.cxx", ("no-such-compiler",)),
        pytest.raises(UnavailableError, match="no C\\+\\+ compiler"),
    ):
        check_execution(_params(compile=True), SINGLE, "image_classification")
    check_execution(_params(compile=False), SINGLE, "image_classification")


@pytest.mark.parametrize(
    ("channels_last", "placement", "expected"),
    [("auto", SINGLE, True), (True, SINGLE, True), (False, SINGLE, False), ("auto", ZERO_2, False)],
)
def test_apply_execution_gives_weights_the_requested_memory_layout(
    channels_last: Any, placement: Placement, expected: bool
) -> None:
    network = build_network(spec())
    apply_execution(
        network, _params(channels_last=channels_last), placement, "image_classification"
    )
    weight = network.get_parameter("backbone.stages.0.conv1.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) is expected


def test_compilation_keeps_the_names_of_the_weights() -> None:
    network, compiled = build_network(spec()), build_network(spec())
    apply_execution(compiled, _params(compile=True), SINGLE, "image_classification")
    assert list(compiled.state_dict()) == list(network.state_dict())
    assert compiled._compiled_call_impl is not None


@NEEDS_COMPILER
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_killed_compiled_training_ends_with_the_weights_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    whole, killed, plain = (
        write_project(tmp_path / name, compile=name != "plain")
        for name in ("whole", "killed", "plain")
    )
    done = run_training(whole)
    assert done.returncode == 0, done.stderr
    kill_after(killed, "epoch 2/4")
    assert "resumed   after epoch" in run_training(killed).stdout
    assert weights_digest(killed) == weights_digest(whole)
    assert run_training(plain).returncode == 0
    names = [
        set(safetensors.torch.load_file(project / "artifacts/model/weights.safetensors"))
        for project in (whole, plain)
    ]
    assert names[0] == names[1]


@NEEDS_COMPILER
@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "deepspeed_stage_2"])
def test_a_compiled_training_on_two_processes_succeeds(tmp_path: Path, strategy: str) -> None:
    done = run_training(
        write_project(tmp_path, compile=True, devices=2, strategy=strategy, epochs=2)
    )
    assert done.returncode == 0, done.stderr
