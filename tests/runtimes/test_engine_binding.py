"""An engine runs only with its own model, TensorRT, GPU and precision, all simulated."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution
from slipway.artifacts.engine_manifest import EngineRequest, Profile, read_engine_manifest
from slipway.runtimes import compilation
from slipway.runtimes.engine_runner import open_engine
from slipway.runtimes.tensorrt import build_engine, check_precision, engine_precision
from slipway.system import files
from slipway.system.errors import EngineError
from tests import fake_tensorrt
from tests.serving.bundles import CONTRACT, probabilities, write_bundle

PROFILE = Profile(smallest=1, optimal=4, largest=16)


def request_for(precision: str, profile: Profile = PROFILE) -> EngineRequest:
    execution = Execution(
        backend="tensorrt", provider="tensorrt", precision=precision, variant="fp32"
    )
    return EngineRequest(requested=execution, profile=profile, workspace_mib=64)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, LoadedBundle]:
    """Compile an engine on a fake GPU. Returns its folder and its bundle."""
    fake_tensorrt.pretend(monkeypatch.setattr)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setattr(
        compilation,
        "build_engine_apart",
        lambda module, request: build_engine(fake_tensorrt, request),
    )
    bundle = write_bundle(tmp_path / "bundle")
    compilation.compile_engine(
        tmp_path / "engine", bundle, request_for("fp32"), tmp_path / "timing.cache"
    )
    return tmp_path / "engine", bundle


def test_compiled_engine_loads_and_predicts(engine: tuple[Path, LoadedBundle]) -> None:
    root, bundle = engine
    pixels = np.random.default_rng(0).integers(0, 256, (16, *CONTRACT.shape), dtype=np.uint8)
    assert np.allclose(
        open_engine(root, bundle).run(pixels).outputs, probabilities(pixels), atol=1e-6
    )


def test_the_engine_manifest_records_the_actual_precision_and_the_machine(
    engine: tuple[Path, LoadedBundle],
) -> None:
    root, bundle = engine
    engine_manifest = read_engine_manifest(root)
    assert (engine_manifest.actual, engine_manifest.precision_read_from) == (
        engine_manifest.requested,
        "engine",
    )
    assert engine_manifest.profile == PROFILE
    assert engine_manifest.model_sha256 == bundle.manifest.models["fp32"].sha256
    assert engine_manifest.machine.model_dump() == {
        "tensorrt_version": "10.16.1",
        **fake_tensorrt.GPU,
    }


def alter(root: Path, *place: str, value: object) -> None:
    content = json.loads((root / "engine_manifest.json").read_text())
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    files.write_json(root / "engine_manifest.json", content)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("model_sha256",), "0" * 64, "model digest: built with 0000"),
        (("machine", "tensorrt_version"), "10.13.3", "TensorRT: built with 10.13.3, here 10.16.1"),
        (("machine", "gpu"), "A100", "GPU: built with A100, here Pretended H200"),
        (("machine", "compute_capability"), "8.0", "compute capability: built with 8.0, here 9.0"),
        (("actual", "precision"), "fp16", "precision: built with fp16, here fp32"),
        (("profile", "largest"), 32, "largest batch: built with 32, here 16"),
        (("profile", "optimal"), 8, "the engine's profile is"),
    ],
)
def test_engine_is_refused_if_one_property_differs_and_the_error_names_that_property(
    engine: tuple[Path, LoadedBundle], place: tuple[str, ...], value: object, reason: str
) -> None:
    root, bundle = engine
    assert open_engine(root, bundle)
    alter(root, *place, value=value)
    with pytest.raises(EngineError, match=reason):
        open_engine(root, bundle)


def test_another_driver_or_cuda_runtime_does_not_invalidate_the_engine(
    engine: tuple[Path, LoadedBundle],
) -> None:
    root, bundle = engine
    for name in ("driver_version", "driver_cuda_version", "cuda_version"):
        alter(root, "machine", name, value="other")
    assert open_engine(root, bundle)


def test_compile_refuses_a_graph_of_another_precision_than_requested(
    engine: tuple[Path, LoadedBundle], tmp_path: Path
) -> None:
    _, bundle = engine
    with pytest.raises(EngineError, match="the graph is of precision fp32, fp16 was requested"):
        compilation.compile_engine(
            tmp_path / "other", bundle, request_for("fp16"), tmp_path / "timing.cache"
        )


class Inspected:
    """A fake engine whose inspector shows these formats and types of convolution weights."""

    def __init__(self, *formats: str, weights: tuple[str, ...] = ()) -> None:
        self._layers: list[Any] = [
            {
                "Name": "Half Int8 FP8",
                "Inputs": [{"Format/Datatype": text}],
                "ParameterType": "Constant",
                "Weights": {"Type": "Int8"},
            }
            for text in formats
        ]
        self._layers += [
            {
                "ParameterType": "Convolution",
                "Inputs": [{"Format/Datatype": "N/A due to dynamic shapes"}],
                "Weights": {"Type": text, "Count": 9408},
                "Bias": {"Type": "Float", "Count": 64},
            }
            for text in weights
        ]

    def create_engine_inspector(self) -> "Inspected":
        return self

    def get_engine_information(self, form: Any) -> str:
        return json.dumps({"Layers": self._layers, "Bindings": []})


@pytest.mark.parametrize(
    ("formats", "precision"),
    [
        ((), None),
        (("UInt8", "Int64"), None),
        (("Float",), "fp32"),
        (("UInt8", "Row major linear FP32"), "fp32"),
        (("Float", "Half"), "fp16"),
        (("Channel major FP16 format where channel % 8 == 0",), "fp16"),
        (("BFloat16", "Half"), "bf16"),
        (("Thirty-two wide channel vectorized row major Int8 format", "Half"), "int8"),
        (("FP8", "Int8"), "fp8"),
    ],
)
def test_the_precision_of_an_engine_is_the_lowest_of_its_layers(
    formats: tuple[str, ...], precision: str | None
) -> None:
    assert engine_precision(fake_tensorrt, Inspected(*formats)) == (precision, False)


def test_an_engine_that_computes_in_a_lower_precision_than_requested_is_refused() -> None:
    assert check_precision(fake_tensorrt, Inspected("Half"), "fp16") == "engine"
    assert (
        check_precision(fake_tensorrt, Inspected("Float"), "fp16") == "network"
    )  # fused layers show their ends alone
    with pytest.raises(EngineError, match="computes in int8, fp16 was requested"):
        check_precision(fake_tensorrt, Inspected("Half", "Int8"), "fp16")
    with pytest.raises(EngineError, match="computes in fp16, fp32 was requested"):
        check_precision(fake_tensorrt, Inspected("Half"), "fp32")


def test_an_engine_whose_convolutions_have_another_precision_than_requested_is_refused() -> None:
    half = Inspected("Float", weights=("Float", "Half"))
    assert check_precision(fake_tensorrt, half, "fp16") == "engine"
    dynamic = Inspected("Float", weights=("None",))  # weights that are no constants
    assert check_precision(fake_tensorrt, dynamic, "fp16") == "network"
    mixed = Inspected("Int8", weights=("Half",))  # layers that are not quantized
    assert check_precision(fake_tensorrt, mixed, "int8") == "engine"
    for weights, requested, found in (
        (("Float", "Float"), "fp16", "fp32"),
        (("Half",), "int8", "fp16"),
        (("Float", "Half"), "fp32", "fp16"),
    ):
        message = f"computes in {found}, {requested} was requested"
        with pytest.raises(EngineError, match=message):
            check_precision(fake_tensorrt, Inspected("Float", weights=weights), requested)
