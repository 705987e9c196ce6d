"""Real engine builds: tensorrt_rtx has TensorRT's API and parser and needs no GPU to build."""

import importlib
import importlib.util
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.engine_manifest import Profile
from slipway.config.params import Params
from slipway.data.store.packed import open_split
from slipway.export.bundle_writer import ExportRows, Trained, write_bundle
from slipway.export.certification.lineage import trace_lineage
from slipway.export.graphs.variants import MEANT_FOR
from slipway.inputs.images import ImageContract
from slipway.runtimes.tensorrt import BuildRequest, build_engine, build_engine_apart
from slipway.system.errors import EngineError
from slipway.training.networks.networks import NetworkSpec, build_network
from tests.calibrations import CALIBRATION, calibrated
from tests.export.conftest import QUICK, RESAMPLING, Project
from tests.packed_rows import packed_split
from tests.packed_tables import write_packed_table

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="tensorrt_rtx is not installed"
)
FOR_TENSORRT = [variant for variant, targets in MEANT_FOR.items() if "tensorrt" in targets]


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory: pytest.TempPathFactory, export_params: Params) -> LoadedBundle:
    """Export timm's untrained resnet18 with the whole of `export`."""
    contract = ImageContract(
        kind="images",
        transform=None,
        size_px=32,
        channels=3,
        resize_mode="stretch",
        interpolation="bilinear",
        max_pixels=10**6,
    )
    spec = NetworkSpec(
        task="image_classification",
        name="timm/resnet18",
        arguments={},
        classes=["a", "b", "c"],
        input=contract,
        mean=[0.5] * 3,
        std=[0.25] * 3,
        target_scale=None,
    )
    torch.manual_seed(0)
    pictures = np.random.default_rng(0).integers(0, 256, (32, *contract.shape), dtype=np.uint8)
    trained = Trained(
        calibrated(build_network(spec), pictures),
        spec.task,
        contract,
        spec.classes,
        "0" * 64,
        CALIBRATION,
        {},
        {},
    )
    folder = tmp_path_factory.mktemp("resnet18")
    ids = [f"{row:016x}" for row in range(len(pictures))]
    rows = ExportRows(pictures, packed_split(pictures, np.arange(len(pictures)) % 3, ids, ids))
    write_bundle(
        folder, trained, rows, export_params.export, RESAMPLING, trace_lineage({}, []), QUICK
    )
    return load_bundle(folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory, export_params: Params) -> LoadedBundle:
    """Export an untrained network for tables with the whole of `export`."""
    root = tmp_path_factory.mktemp("table")
    manifest = write_packed_table(
        root / "packed", "table_classification", {"train": 200, "val": 40}
    )
    arguments = {
        "num_submodels": 4,
        "num_blocks": 2,
        "width": 32,
        "dropout": 0.1,
        "embedding_size": 8,
        "num_bins": 16,
    }
    spec = NetworkSpec(
        task=manifest.task,
        name="tabm",
        arguments=arguments,
        classes=manifest.classes,
        input=manifest.input,
        mean=[],
        std=[],
        target_scale=None,
    )
    torch.manual_seed(0)
    train, val = (open_split(root / "packed", manifest, split) for split in ("train", "val"))
    network = calibrated(build_network(spec), train.inputs[:])
    trained = Trained(network, spec.task, spec.input, spec.classes, "0" * 64, CALIBRATION, {}, {})
    (root / "bundle").mkdir()
    rows = ExportRows(train.inputs[:], val)
    write_bundle(
        root / "bundle",
        trained,
        rows,
        export_params.export,
        RESAMPLING,
        trace_lineage({}, []),
        QUICK,
    )
    return load_bundle(root / "bundle")


def request_for(bundle: LoadedBundle, variant: str, timing_cache: bytes = b"") -> BuildRequest:
    return BuildRequest(
        model=bundle.model_bytes(variant),
        input_name=bundle.manifest.input_name,
        row_shape=bundle.manifest.input.shape,
        precision=bundle.manifest.models[variant].precision,
        profile=Profile(smallest=1, optimal=8, largest=32),
        workspace_bytes=256 << 20,
        timing_cache=timing_cache,
        compute_capability="SM86",
    )


def nothing() -> BuildRequest:
    return BuildRequest(
        b"",
        "image",
        (1, 1, 1),
        "fp32",
        Profile(smallest=1, optimal=1, largest=1),
        workspace_bytes=1,
    )


@needs_rtx
@pytest.mark.process
@pytest.mark.parametrize("variant", FOR_TENSORRT)
def test_every_tensorrt_variant_builds_with_a_dynamic_profile(
    classifier: Project, variant: str
) -> None:
    request = request_for(classifier.bundle(), variant)
    built = build_engine_apart("tensorrt_rtx", request)
    assert len(built.plan) > 1000
    assert (built.precision, built.precision_read_from) == (request.precision, "network")


@needs_rtx
@pytest.mark.nightly
@pytest.mark.parametrize("variant", FOR_TENSORRT)
def test_every_tensorrt_variant_of_a_timm_network_builds_with_a_dynamic_profile(
    resnet18: LoadedBundle, variant: str
) -> None:
    built = build_engine_apart("tensorrt_rtx", request_for(resnet18, variant))
    assert len(built.plan) > resnet18.manifest.models[variant].bytes / 2


@needs_rtx
@pytest.mark.process
@pytest.mark.parametrize("variant", FOR_TENSORRT)
def test_every_tensorrt_variant_of_a_table_network_builds_with_a_dynamic_profile(
    table: LoadedBundle, variant: str
) -> None:
    request = request_for(table, variant)
    built = build_engine_apart("tensorrt_rtx", request)
    assert len(built.plan) > 1000
    assert built.precision == request.precision


@needs_rtx
@pytest.mark.process
def test_a_graph_that_tensorrt_rejects_is_refused_with_the_parsers_message(
    classifier: Project,
) -> None:
    with pytest.raises(EngineError, match=r"does not accept the graph(.|\n)*DequantizeLinear"):
        build_engine_apart("tensorrt_rtx", request_for(classifier.bundle(), "int8"))


@needs_rtx
@pytest.mark.process
def test_build_engine_refuses_a_graph_of_another_precision_than_requested(
    classifier: Project,
) -> None:
    tensorrt_rtx = importlib.import_module("tensorrt_rtx")
    for found, requested in (("fp32", "fp16"), ("fp16", "int8"), ("int8_tensorrt", "fp16")):
        with pytest.raises(
            EngineError,
            match=f"the graph is of precision {found.split('_')[0]}, {requested} was requested",
        ):
            build_engine(
                tensorrt_rtx, replace(request_for(classifier.bundle(), found), precision=requested)
            )


@needs_rtx
@pytest.mark.process
def test_a_timing_cache_can_be_reused(classifier: Project) -> None:
    first = build_engine_apart("tensorrt_rtx", request_for(classifier.bundle(), "fp16"))
    assert build_engine_apart(
        "tensorrt_rtx", request_for(classifier.bundle(), "fp16", first.timing_cache)
    ).plan


@pytest.mark.process
@pytest.mark.parametrize(
    ("death", "message"),
    [
        ("os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("os._exit(3)", "ended with exit code 3"),
    ],
)
def test_a_crash_inside_tensorrt_becomes_an_error_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str, message: str
) -> None:
    (tmp_path / "crashing_tensorrt.py").write_text(f"import os\n{death}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineError, match=message):
        build_engine_apart("crashing_tensorrt", nothing())


@pytest.mark.process
def test_a_missing_tensorrt_becomes_an_error_message() -> None:
    with pytest.raises(EngineError, match="No module named 'no_such_tensorrt'"):
        build_engine_apart("no_such_tensorrt", nothing())


@needs_rtx
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "Builder",
            "create_network create_builder_config "
            "create_optimization_profile build_serialized_network",
        ),
        ("INetworkDefinition", "num_layers get_layer"),
        ("ILayer", "num_outputs get_output"),
        ("OnnxParser", "parse num_errors get_error"),
        (
            "IBuilderConfig",
            "clear_flag set_memory_pool_limit create_timing_cache "
            "set_timing_cache get_timing_cache profiling_verbosity",
        ),
        ("Runtime", "deserialize_cuda_engine"),
        (
            "ICudaEngine",
            "num_io_tensors get_tensor_name get_tensor_dtype "
            "get_tensor_profile_shape create_engine_inspector",
        ),
        ("ICudaEngine", "create_execution_context"),
        ("EngineInspector", "get_engine_information"),
        ("IExecutionContext", "set_tensor_address set_input_shape execute_async_v3"),
        ("LayerInformationFormat", "JSON"),
        ("ProfilingVerbosity", "DETAILED"),
        ("DataType", "FLOAT HALF BF16 INT8 UINT8"),
    ],
)
def test_the_fake_tensorrt_has_only_members_of_the_real_one(kind: str, names: str) -> None:
    real = getattr(importlib.import_module("tensorrt_rtx"), kind)
    assert [name for name in names.split() if not hasattr(real, name)] == []
    assert not hasattr(real, "no_such_name")


def test_error_for_an_old_tensorrt_names_the_found_and_the_expected_version() -> None:
    old = types.ModuleType("tensorrt")
    old.__dict__["__version__"] = "10.9.0.34"
    with pytest.raises(
        EngineError, match=r"TensorRT 10\.9\.0\.34 is installed, expected at least 10\.13"
    ):
        build_engine(old, nothing())
