"""Two models of one architecture never share a cached engine, as they would by default."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle, describe_model
from slipway.artifacts.engine_manifest import Profile
from slipway.runtimes import runtime
from slipway.runtimes.engine_cache import SEAL, EngineKey, engine_folder
from slipway.runtimes.runtime import ONNX_TENSORRT, open_onnx_tensorrt, why_unavailable
from slipway.system.errors import EngineError, IntegrityError, UnavailableError
from tests import fake_tensorrt
from tests.serving.bundles import CONTRACT, WEIGHTS, classifier, write_bundle

PROFILE = Profile(smallest=1, optimal=4, largest=16)
PIXELS = np.random.default_rng(0).integers(0, 256, (5, *CONTRACT.shape), dtype=np.uint8)
Seeds = tuple[LoadedBundle, LoadedBundle]


def of_seed(root: Path, seed: int) -> LoadedBundle:
    """Write a bundle of one architecture as fp16, with weights drawn from `seed`."""
    graph = classifier()
    weights = np.random.default_rng(seed).normal(size=WEIGHTS.shape).astype(np.float32) / 800
    graph.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, "weights"))
    bundle = write_bundle(root, graph)
    models = {
        "fp16": describe_model(root / "model_fp32.onnx", "fp16", ["cuda", "tensorrt"]),
        **bundle.manifest.models,
    }
    return write_bundle(root, graph, models=models)


@pytest.fixture
def seeds(tmp_path: Path) -> Seeds:
    return of_seed(tmp_path / "first", 1), of_seed(tmp_path / "second", 2)


def right(bundle: LoadedBundle) -> NDArray[np.float32]:
    session = NaiveSession.real(bundle.model_bytes("fp16"), providers=["CPUExecutionProvider"])
    answer: NDArray[np.float32] = session.run(None, {"image": PIXELS})[0]
    return answer


class NaiveSession:
    """A fake session of ONNX Runtime that names cached engines as the TensorRT provider does."""

    builds = True
    real = onnxruntime.InferenceSession

    def __init__(self, model: bytes, sess_options: Any, providers: list[Any]) -> None:
        (self.first, options), *_ = providers
        names = "_".join(
            node.name or node.op_type for node in onnx.load_model_from_string(model).graph.node
        )
        path = (
            Path(options["trt_engine_cache_path"])
            / f"{options.get('trt_engine_cache_prefix', 'TRT')}_{names}.engine"
        )
        if self.builds and not path.exists():
            path.write_bytes(model)
        self._session = self.real(
            path.read_bytes() if self.builds else model, providers=["CPUExecutionProvider"]
        )

    def get_providers(self) -> list[str]:
        return [self.first]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> type[NaiveSession]:
    fake_tensorrt.pretend(monkeypatch.setattr)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setattr(runtime, "why_unavailable", lambda provider: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", NaiveSession)
    return NaiveSession


def naive_answer(bundle: LoadedBundle, cache: Path) -> NDArray[np.float32]:
    """Predict with one cache folder for all models, as the provider's documentation proposes."""
    cache.mkdir(exist_ok=True)
    options = {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(cache)}
    session = NaiveSession(
        bundle.model_bytes("fp16"), None, [("TensorrtExecutionProvider", options)]
    )
    answer: NDArray[np.float32] = session.run(None, {"image": PIXELS})[0]
    return answer


def test_onnx_runtime_serves_the_wrong_engine_from_a_shared_cache_folder(
    seeds: Seeds, provider: type[NaiveSession], tmp_path: Path
) -> None:
    """Control: shows the fault that separate folders prevent."""
    first, second = seeds
    assert np.array_equal(naive_answer(first, tmp_path / "shared"), right(first))
    assert np.array_equal(naive_answer(second, tmp_path / "shared"), right(first))
    assert not np.allclose(right(first), right(second), atol=1e-3)


def test_two_seeds_of_one_architecture_never_share_an_engine(
    seeds: Seeds, provider: type[NaiveSession], tmp_path: Path
) -> None:
    for _ in range(2):  # built, and then read
        for bundle in seeds:
            runner = open_onnx_tensorrt(bundle, "fp16", PROFILE, tmp_path / "cache", 1)
            assert np.array_equal(runner.run(PIXELS).outputs, right(bundle))
            assert (runner.actual.backend, runner.actual.provider) == ("onnxruntime", "tensorrt")
    folders = list((tmp_path / "cache").iterdir())
    assert len(folders) == 2
    assert (
        len({next(folder.glob("*.engine")).name for folder in folders}) == 2
    )  # nor would they in one folder


def key_of(bundle: LoadedBundle, **changes: Any) -> EngineKey:
    key = EngineKey(
        model_sha256=bundle.manifest.models["fp16"].sha256,
        precision="fp16",
        profile=PROFILE,
        onnxruntime_version="1.31.1",
        tensorrt_version="10.16.1", gpu="H200", compute_capability="9.0",
    )  # fmt: skip
    return key.model_copy(update=changes)


def build(folder: Path, key: EngineKey) -> None:
    with engine_folder(folder, key) as building:
        (building / "x.engine").write_bytes(b"an engine")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model_sha256": "0" * 64}, "model_sha256"),
        ({"precision": "int8"}, "precision"),
        ({"profile": Profile(smallest=1, optimal=8, largest=16)}, "profile"),
        ({"onnxruntime_version": "1.30"}, "onnxruntime_version"),
        ({"tensorrt_version": "10.13"}, "tensorrt_version"),
        ({"gpu": "A100"}, "gpu"),
        ({"compute_capability": "8.0"}, "compute_capability"),
    ],
)
def test_error_lists_the_differences_of_another_engine_key(
    seeds: Seeds, tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    own, other = key_of(seeds[0]), key_of(seeds[0], **change)
    assert own.folder != other.folder
    build(tmp_path / "folder", own)
    with engine_folder(tmp_path / "folder", own) as folder:
        assert (folder / "x.engine").read_bytes() == b"an engine"
    with pytest.raises(EngineError, match=f"engines of another key. {name}: built with"):
        build(tmp_path / "folder", other)


def test_engine_cache_refuses_a_folder_without_a_seal(
    seeds: Seeds, provider: type[NaiveSession], tmp_path: Path
) -> None:
    naive_answer(seeds[0], tmp_path / "shared")
    with pytest.raises(EngineError, match="of unknown origin"):
        build(tmp_path / "shared", key_of(seeds[1]))


def test_altered_and_foreign_engines_in_the_cache_are_refused(seeds: Seeds, tmp_path: Path) -> None:
    key = key_of(seeds[0])
    build(tmp_path / "folder", key)
    (tmp_path / "folder/y.engine").write_bytes(b"another")
    with pytest.raises(EngineError, match=r"holds \['y\.engine'\], which its seal does not list"):
        build(tmp_path / "folder", key)
    (tmp_path / "folder/y.engine").unlink()
    (tmp_path / "folder/x.engine").write_bytes(b"an Engine")
    with pytest.raises(IntegrityError, match=r"x\.engine was altered or removed"):
        build(tmp_path / "folder", key)
    (tmp_path / "folder" / SEAL).write_text("{}")
    with pytest.raises(EngineError, match="is not a valid EngineSeal"):
        build(tmp_path / "folder", key)


def test_failed_engine_build_leaves_no_cache_folder(seeds: Seeds, tmp_path: Path) -> None:
    def fail() -> None:
        with engine_folder(
            tmp_path / "cache" / key_of(seeds[0]).folder, key_of(seeds[0])
        ) as folder:
            (folder / "x.engine").write_bytes(b"half an engine")
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_tensorrt_provider_that_delegates_the_whole_graph_is_refused(
    seeds: Seeds, provider: type[NaiveSession], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NaiveSession, "builds", False)
    with pytest.raises(
        UnavailableError,
        match="built no engine: it gave every part of the graph to another provider",
    ):
        open_onnx_tensorrt(seeds[0], "fp16", PROFILE, tmp_path / "cache", 1)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_session_that_fell_back_to_another_provider_is_refused(
    seeds: Seeds, provider: type[NaiveSession], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NaiveSession, "get_providers", lambda self: ["CUDAExecutionProvider"])
    with pytest.raises(UnavailableError, match="but ONNX Runtime chose CUDAExecutionProvider"):
        open_onnx_tensorrt(seeds[0], "fp16", PROFILE, tmp_path / "cache", 1)


def test_provider_options_never_lower_the_precision_and_fp32_is_refused_due_to_tf32(
    seeds: Seeds, provider: type[NaiveSession], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, str] = {}
    start = NaiveSession.__init__

    def spy(self: NaiveSession, model: bytes, sess_options: Any, providers: list[Any]) -> None:
        given.update(providers[0][1])
        start(self, model, sess_options, providers)

    monkeypatch.setattr(NaiveSession, "__init__", spy)
    open_onnx_tensorrt(seeds[0], "fp16", PROFILE, tmp_path / "cache", 1)
    assert not [
        name for name in given if name.endswith(("fp16_enable", "int8_enable", "bf16_enable"))
    ]
    assert (given["trt_profile_min_shapes"], given["trt_profile_max_shapes"]) == (
        "image:1x8x8x3",
        "image:16x8x8x3",
    )
    with pytest.raises(UnavailableError, match="computes fp32 in TF32"):
        open_onnx_tensorrt(seeds[0], "fp32", PROFILE, tmp_path / "cache", 1)


NO_PROVIDER = why_unavailable(ONNX_TENSORRT)


@pytest.mark.skipif(NO_PROVIDER is None, reason="there is a GPU with TensorRT")
def test_without_a_gpu_the_tensorrt_provider_is_refused_and_never_replaced(
    seeds: Seeds, tmp_path: Path
) -> None:
    with pytest.raises(
        UnavailableError, match=f"{ONNX_TENSORRT!r} was requested and cannot run here"
    ):
        open_onnx_tensorrt(seeds[0], "fp16", PROFILE, tmp_path / "cache", 1)


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.skipif(NO_PROVIDER is not None, reason=str(NO_PROVIDER))
def test_two_models_on_a_gpu_have_separate_engines_and_predictions(
    seeds: Seeds, tmp_path: Path
) -> None:
    for _ in range(2):
        for bundle in seeds:
            runner = open_onnx_tensorrt(bundle, "fp16", PROFILE, tmp_path / "cache", 1)
            assert np.allclose(runner.run(PIXELS).outputs, right(bundle), atol=1e-3)
