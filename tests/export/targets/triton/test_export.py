"""The model repository for Triton and KServe, checked by their schemas and a fake server."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime
import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from slipway.artifacts.locations import CAPACITY
from slipway.export.targets.edge.environment import install
from slipway.export.targets.triton.export import (
    ServerExport,
    config_text,
    read_batching,
    require_name,
    run_server_hop,
    write_server,
)
from slipway.system.errors import ParityError, UnavailableError
from tests.export.targets.sources import image_source, photos, table_source

TRITON = ServerExport("triton", "digits", "", None)
KSERVE = ServerExport("kserve", "digits", "pvc://models/digits", None)
KSERVE_PACKAGE = "kserve==0.21.0"
# Reads a manifest by the models of KServe's SDK, which have no field for an unknown key.
SCHEMA = """
import re, sys, yaml
import kserve, kubernetes.client
def model(name):
    return getattr(kserve, name, None) or getattr(kubernetes.client, name, None)
def check(value, kind, where):
    if kind.startswith("list["):
        return [check(one, kind[5:-1], where) for one in value]
    if kind.startswith("dict("):
        return [check(one, kind[5:-1].split(", ")[1], where) for one in value.values()]
    cls = model(kind)
    if cls is None or not hasattr(cls, "openapi_types"):
        if kind in ("str", "int", "bool"):
            assert isinstance(value, eval(kind)), (where, value, kind)
        return
    names = {public: own for own, public in cls.attribute_map.items()}
    for key, inner in value.items():
        assert key in names, f"{where}: unknown key {key}, expected {sorted(names)}"
        check(inner, cls.openapi_types[names[key]], f"{where}.{key}")
check(yaml.safe_load(open(sys.argv[1])), "V1beta1InferenceService", "")
"""


def card(version: str, rate: float | None = 400.0) -> str:
    settings = {"SLIPWAY_WORKERS": "2", "SLIPWAY_NUM_THREADS": "3", "SLIPWAY_MAX_BATCH_SIZE": "64"}
    return json.dumps(
        {
            "format_version": 1,
            "model": {"version": version},
            "settings": settings,
            "carried": {"rate": rate},
            "goal": {"p99_ms": 50},
        }
    )


def parsed(text: str) -> Any:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@contextmanager
def server(repository: Path, shift: float = 0.0) -> Iterator[str]:
    """Start a fake server of the Open Inference Protocol that reads a repository as Triton does."""
    (folder,) = repository.iterdir()
    config = parsed((folder / "config.pbtxt").read_text())
    session = onnxruntime.InferenceSession(folder / "1/model.onnx")
    (own,) = config.input
    dtype = {"TYPE_UINT8": np.uint8, "TYPE_FP32": np.float32}[
        model_config_pb2.DataType.Name(own.data_type)
    ]

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
        def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802, the protocol's name
            if request.model_name != config.name:
                context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
            (given,) = request.inputs
            assert list(given.shape)[1:] == list(own.dims)
            row = np.frombuffer(request.raw_input_contents[0], dtype).reshape(given.shape)
            answer = service_pb2.ModelInferResponse(model_name=config.name)
            for output in config.output:
                values = session.run([output.name], {own.name: row})[0] + np.float32(shift)
                shape = [len(values), *output.dims]
                tensor = answer.outputs.add(name=output.name, datatype="FP32", shape=shape)
                assert np.prod(tensor.shape) == values.size
                answer.raw_output_contents.append(values.astype(np.float32).tobytes())
            return answer

    running = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), running)
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        running.stop(None).wait()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no capacity card of another project


def test_the_configuration_fits_nvidias_schema_and_names_tensors_and_labels(
    tmp_path: Path,
) -> None:
    source = image_source(tmp_path, photos())
    record = write_server(tmp_path / "triton", source, TRITON)
    model = tmp_path / "triton/model_repository/digits"
    config = parsed((model / "config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == ("digits", "onnxruntime", 16)
    (image,) = config.input
    assert (image.name, list(image.dims)) == ("image", [8, 8, 3])
    probabilities, score = config.output
    assert (probabilities.name, probabilities.label_filename) == ("probabilities", "labels.txt")
    assert (score.name, list(score.dims), list(score.reshape.shape)) == ("ood_score", [1], [])
    assert (model / "labels.txt").read_text().split() == source.bundle.manifest.output.labels
    assert (model / "1/model.onnx").read_bytes() == source.graph()
    assert record.facts["schema"].startswith("config.pbtxt fits model_config.proto")
    assert "model_repository/digits/1/model.onnx" in record.files
    assert not record.certified
    assert "no --server was given" in record.hop.reason


def test_schema_of_triton_refuses_an_unknown_field(tmp_path: Path) -> None:
    text = config_text(image_source(tmp_path, photos()), "digits", None)
    with pytest.raises(text_format.ParseError, match="max_batch"):
        parsed(text.replace("max_batch_size", "max_batch"))


def test_triton_batching_comes_from_the_load_test_of_this_model(tmp_path: Path) -> None:
    source, path = table_source(tmp_path), tmp_path / "capacity.json"
    path.write_text(card(source.bundle.version))
    batching, remark = read_batching(path, source)
    # 16 rows, the bundle's largest batch, come in 40 ms; a tenth of the limit is 5 ms.
    assert remark == "batches of 16 within 5000 us, 2 instances of 3 threads"
    config = parsed(config_text(source, "digits", batching))
    assert list(config.dynamic_batching.preferred_batch_size) == [16]
    assert config.dynamic_batching.max_queue_delay_microseconds == 5000
    assert config.instance_group[0].count == 2
    assert config.parameters["intra_op_thread_count"].string_value == "3"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is missing; run `slipway tune serving`"),
        ("{", "cannot be read"),
        (card("another"), "is of another model"),
        (card("own", rate=None), "has no capacity"),
    ],
)
def test_triton_configuration_leaves_batching_to_the_server_without_a_load_test(
    content: str | None, reason: str, tmp_path: Path
) -> None:
    source, path = table_source(tmp_path), tmp_path / "capacity.json"
    if content is not None:
        path.write_text(content.replace('"own"', f'"{source.bundle.version}"'))
    batching, remark = read_batching(path, source)
    assert batching is None
    assert reason in remark
    assert parsed(config_text(source, "digits", None)).HasField("dynamic_batching")


@pytest.mark.parametrize("name", ["../up", "a/b", "", "-a", "Digits", "a" * 64, "a\n"])
def test_a_name_that_is_a_path_or_that_kubernetes_refuses_is_refused(name: str) -> None:
    with pytest.raises(UnavailableError, match="expected at most 63 small letters"):
        require_name(name)


@pytest.mark.process
@pytest.mark.parametrize("is_table", [False, True])
def test_triton_export_is_certified_by_a_server_that_loaded_it(
    is_table: bool, tmp_path: Path
) -> None:
    source = table_source(tmp_path) if is_table else image_source(tmp_path, photos())
    write_server(tmp_path / "triton", source, TRITON)
    with server(tmp_path / "triton/model_repository") as address:
        record = write_server(
            tmp_path / "again", source, ServerExport("triton", "digits", "", address)
        )
    assert record.certified
    assert record.hop.max_difference == 0.0


@pytest.mark.process
def test_triton_hop_refuses_a_server_with_other_predictions_or_without_the_model(
    tmp_path: Path,
) -> None:
    source = image_source(tmp_path, photos())
    write_server(tmp_path / "triton", source, TRITON)
    with server(tmp_path / "triton/model_repository", shift=0.01) as address:
        given = ServerExport("triton", "digits", "", address)
        with pytest.raises(ParityError, match="hop triton differs"):
            write_server(tmp_path / "again", source, given)
        with pytest.raises(UnavailableError, match=r"did not answer row 0 .*unknown model"):
            run_server_hop(source, ServerExport("triton", "other", "", address))
    with pytest.raises(UnavailableError, match="expected a server of the Open Inference Protocol"):
        run_server_hop(source, given)
    assert not (tmp_path / "again").exists()


def test_the_inference_service_names_runtime_storage_and_cores(tmp_path: Path) -> None:
    source = image_source(tmp_path, photos())
    CAPACITY.parent.mkdir()
    CAPACITY.write_text(card(source.bundle.version))
    write_server(tmp_path / "kserve", source, KSERVE)
    content = yaml.safe_load((tmp_path / "kserve/inference_service.yaml").read_text())
    model = content["spec"]["predictor"]["model"]
    assert model["storageUri"] == "pvc://models/digits"
    assert model["protocolVersion"] == "v2"
    assert model["resources"]["limits"] == {"cpu": "6"}
    assert content["metadata"]["annotations"]["slipway-bundle-sha256"] == source.bundle.digest


@pytest.mark.nightly(seconds=90)
@pytest.mark.skipif(shutil.which("uv") is None, reason="there is no uv here")
def test_the_inference_service_fits_the_models_of_kserves_sdk(tmp_path: Path) -> None:
    write_server(tmp_path / "kserve", image_source(tmp_path, photos()), KSERVE)
    manifest = tmp_path / "kserve/inference_service.yaml"
    (tmp_path / "requirements.txt").write_text(KSERVE_PACKAGE)
    try:
        install(tmp_path / "environment", tmp_path / "requirements.txt")
    except UnavailableError as error:
        pytest.skip(str(error))

    def check(path: Path) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "environment/bin/python"), "-c", SCHEMA, str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = check(manifest)
    assert done.returncode == 0, done.stderr
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(manifest.read_text().replace("storageUri", "storageURL"))
    assert "unknown key storageURL" in check(wrong).stderr
