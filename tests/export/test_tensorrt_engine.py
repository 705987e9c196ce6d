"""The engine builder, run for real: tensorrt_rtx has TensorRT's own API and parser and builds without a GPU."""

import importlib.util
import types
from pathlib import Path

import pytest

from slipway.errors import EngineError
from slipway.export.tensorrt_engine import BuildRequest, build_engine, build_engine_apart
from slipway.export.variants import MEANT_FOR
from slipway.passport import Profile
from tests.export.conftest import Project

needs_rtx = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed")
FOR_TENSORRT = [variant for variant, targets in MEANT_FOR.items() if "tensorrt" in targets]


def request_for(project: Project, variant: str, timing_cache: bytes = b"") -> BuildRequest:
    bundle = project.bundle()
    return BuildRequest(
        model=bundle.model_bytes(variant),
        input_name=bundle.manifest.input_name,
        image_shape=bundle.manifest.input.shape,
        profile=Profile(smallest=1, optimal=8, largest=32),
        workspace_bytes=256 << 20,
        timing_cache=timing_cache,
        compute_capability="SM86",
    )


def nothing() -> BuildRequest:
    return BuildRequest(b"", "image", (1, 1, 1), Profile(smallest=1, optimal=1, largest=1), workspace_bytes=1)


@needs_rtx
@pytest.mark.slow
@pytest.mark.parametrize("variant", FOR_TENSORRT)
def test_every_variant_that_is_meant_for_tensorrt_builds_with_the_dynamic_profile(classifier: Project, variant: str) -> None:
    built = build_engine_apart("tensorrt_rtx", request_for(classifier, variant))
    assert len(built.plan) > 1000


@needs_rtx
@pytest.mark.slow
def test_a_graph_that_tensorrt_does_not_take_is_refused_with_the_parsers_words(classifier: Project) -> None:
    with pytest.raises(EngineError, match=r"does not take the graph(.|\n)*DequantizeLinear"):
        build_engine_apart("tensorrt_rtx", request_for(classifier, "int8"))


@needs_rtx
@pytest.mark.slow
def test_a_timing_cache_can_be_given_back(classifier: Project) -> None:
    first = build_engine_apart("tensorrt_rtx", request_for(classifier, "fp16"))
    assert build_engine_apart("tensorrt_rtx", request_for(classifier, "fp16", first.timing_cache)).plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "message"), [("os.kill(os.getpid(), 11)", "was ended by SIGSEGV"), ("os._exit(3)", "ended with exit code 3")]
)
def test_a_crash_inside_tensorrt_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str, message: str) -> None:
    (tmp_path / "crashing_tensorrt.py").write_text(f"import os\n{death}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineError, match=message):
        build_engine_apart("crashing_tensorrt", nothing())


@pytest.mark.slow
def test_a_tensorrt_that_is_not_installed_is_a_message() -> None:
    with pytest.raises(EngineError, match="No module named 'no_such_tensorrt'"):
        build_engine_apart("no_such_tensorrt", nothing())


def test_an_old_tensorrt_is_refused_with_both_versions() -> None:
    old = types.ModuleType("tensorrt")
    old.__dict__["__version__"] = "10.9.0.34"
    with pytest.raises(EngineError, match=r"TensorRT 10\.9\.0\.34 is installed, expected at least 10\.13"):
        build_engine(old, nothing())
