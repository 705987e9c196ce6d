"""The Open Inference Protocol over gRPC: Triton's client, limits, and malformed messages."""

import asyncio
import json
import random
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from numpy.typing import NDArray
from tritonclient import grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from slipway.serving.auth.keys import add_key
from slipway.serving.extensions import EXTENSIONS
from slipway.serving.grpc_port.extension import GrpcSettings
from slipway.serving.grpc_port.messages import http_body
from slipway.serving.http.responses import Refusal
from slipway.serving.process.addresses import require_safe_start
from slipway.serving.settings import Settings, SettingsError
from slipway.serving.worker import ModelWorker
from tests import plain_http
from tests.serving.bundles import LABELS, SIZE_PX, picture, probabilities, row_classifier, table_row
from tests.serving.conftest import MakeSettings
from tests.serving.grpc_port.raw_calls import (
    DEADLINE_EXCEEDED,
    FRAME_BYTES,
    RESOURCE_EXHAUSTED,
    announced,
    call,
)
from tests.serving.in_process import SlowModel, metric, occupied, run, until
from tests.serving.ready_service import ready_service
from tests.serving.server import Server, free_port

INFER = "/inference.GRPCInferenceService/ModelInfer"
ANSWERED = 'slipway_requests_total{{code="{}",route="/v2/models/slipway/infer"}}'


@dataclass(frozen=True)
class Service:
    """A running service with an HTTP port and a gRPC port."""

    http: Server
    address: str

    def client(self) -> triton.InferenceServerClient:
        return triton.InferenceServerClient(self.address)


def started(folder: Path, graph: Any = None, **settings: object) -> Iterator[Service]:
    port = free_port()
    with ready_service(folder, graph, grpc_port=port, **settings) as server:
        yield Service(server, f"127.0.0.1:{port}")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    yield from started(tmp_path_factory.mktemp("images"), max_body_bytes=1 << 20)


def tensor(name: str, datatype: str, values: NDArray[Any]) -> triton.InferInput:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


def pixels(rows: int, seed: int = 0) -> NDArray[np.uint8]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (rows, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)


def image_request(*, is_raw: bool = True) -> bytes:
    """Return the message that requests the prediction of one image, as raw bytes or as numbers."""
    values = pixels(1)
    request = service_pb2.ModelInferRequest(model_name="slipway", id="one")
    tensor = request.inputs.add(name="image", datatype="UINT8", shape=values.shape)
    if is_raw:
        request.raw_input_contents.append(values.tobytes())
    else:
        tensor.contents.uint_contents.extend(values.flatten().tolist())
    return bytes(request.SerializeToString())


def row_request() -> bytes:
    """Return the message that requests the prediction of one row of a table."""
    request = service_pb2.ModelInferRequest(model_name="slipway", id="one")
    for name, value in table_row(1).items():
        datatype, values = _one(value)
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[1])
        field = {"BYTES": "bytes", "BOOL": "bool", "FP64": "fp64"}[datatype]
        getattr(tensor.contents, f"{field}_contents").extend(values.tolist())
    return bytes(request.SerializeToString())


@pytest.mark.process
def test_the_triton_client_reads_health_metadata_and_statistics(images: Service) -> None:
    client = images.client()
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("slipway")
    metadata = client.get_model_metadata("slipway")
    assert [one.name for one in metadata.inputs] == ["image"]
    assert client.is_model_ready("slipway", metadata.versions[0])
    assert client.get_model_config("slipway").config.input[0].name == "image"
    assert client.get_inference_statistics("slipway").model_stats[0].name == "slipway"
    (model,) = client.get_model_repository_index().models
    assert (model.name, model.state) == ("slipway", "READY")
    assert "binary_tensor_data" in client.get_server_metadata().extensions


@pytest.mark.process
def test_grpc_port_serves_standard_health_checks_and_reflection(images: Service) -> None:
    with grpc.insecure_channel(images.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        found = health.Check(health_pb2.HealthCheckRequest(service=""))
        assert found.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="no service 'other'"):
            health.Check(health_pb2.HealthCheckRequest(service="other"))
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "inference.GRPCInferenceService" in database.get_services()
        pool = DescriptorPool(database)
        service = pool.FindServiceByName("inference.GRPCInferenceService")
        assert "ModelInfer" in service.methods_by_name


@pytest.mark.process
def test_grpc_inference_returns_the_same_predictions_as_http(images: Service) -> None:
    sent = pixels(5)
    result = images.client().infer("slipway", [tensor("image", "UINT8", sent)], request_id="mine")
    np.testing.assert_allclose(result.as_numpy("probabilities"), probabilities(sent), atol=1e-6)
    assert result.get_response().id == "mine"
    assert result.as_numpy("prediction_set").shape == (5, len(LABELS))
    encoded = np.empty(1, object)
    encoded[:] = [picture(3, size=(30, 40))]
    found = images.client().infer("slipway", [tensor("image", "BYTES", encoded)])
    answer = plain_http.post(
        images.http.url + "/predict", content=encoded[0], headers={"content-type": "image/png"}
    ).json()
    assert found.as_numpy("label")[0].decode() == answer["label"]
    assert found.as_numpy("probabilities")[0].tolist() == list(answer["probabilities"].values())


@pytest.mark.process
def test_grpc_stream_replies_to_each_message_and_continues_after_an_error(images: Service) -> None:
    answers: list[Any] = []
    with images.client() as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        for datatype in ("UINT8", "INT8", "UINT8"):
            values = pixels(1).astype(datatype.lower())
            client.async_stream_infer("slipway", [tensor("image", datatype, values)])
        client.stop_stream()
    assert len(answers) == 3
    assert isinstance(answers[1], InferenceServerException)
    assert "INT8" in str(answers[1])
    np.testing.assert_allclose(
        answers[2].as_numpy("probabilities"), probabilities(pixels(1)), atol=1e-6
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "datatype", "rows", "code", "words"),
    [
        ("another", "UINT8", 1, "NOT_FOUND", "no model 'another'"),
        ("../slipway", "UINT8", 1, "NOT_FOUND", "no model"),
        ("slipway", "INT8", 1, "INVALID_ARGUMENT", "INT8"),
        ("slipway", "UINT8", 65, "RESOURCE_EXHAUSTED", "SLIPWAY_MAX_ITEMS"),
    ],
)
def test_refused_grpc_call_has_a_status_code_and_the_reason(
    images: Service, model: str, datatype: str, rows: int, code: str, words: str
) -> None:
    values = pixels(rows).astype(datatype.lower())
    with pytest.raises(InferenceServerException) as raised:
        images.client().infer(model, [tensor("image", datatype, values)])
    assert raised.value.status() == f"StatusCode.{code}"
    assert words in raised.value.message()


@pytest.mark.process
def test_grpc_message_above_the_body_limit_is_refused(images: Service) -> None:
    with grpc.insecure_channel(images.address) as channel:
        call = channel.unary_unary(INFER)
        with pytest.raises(grpc.RpcError) as raised:
            call(bytes(2 << 20))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert images.client().is_server_ready()


@pytest.mark.process
def test_a_message_is_refused_by_its_announced_size_before_it_takes_memory(images: Service) -> None:
    port = int(images.address.rpartition(":")[2])
    memory = Path(f"/proc/{images.http.worker()}/status")

    async def announce(num_bytes: int) -> bytes:
        async with call(port, INFER, announced(num_bytes)) as made:
            status = await made.status()
            for _ in range(64):  # the caller goes on, within the window that it was granted
                await made.send(bytes(FRAME_BYTES))
            return status

    async def announce_often() -> list[bytes]:
        sizes = (2 << 20, 1 << 30, 0xFFFF_FFFF)
        return await asyncio.gather(*(announce(size) for size in sizes for _ in range(20)))

    def peak_kib() -> int:
        return int(re.findall(r"VmHWM:\s+(\d+)", memory.read_text())[0])

    before = peak_kib()
    assert set(asyncio.run(announce_often())) == {RESOURCE_EXHAUSTED}
    assert images.client().is_server_ready()
    assert peak_kib() - before < 32 << 10


@pytest.mark.process
def test_calls_that_send_nothing_more_are_ended_and_counted(make_settings: MakeSettings) -> None:
    port = free_port()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        async def status(path: str, content: bytes = b"") -> bytes:
            async with call(port, path, content) as made:
                return await made.status()

        service = INFER.rpartition("/")[0]
        found = await asyncio.gather(
            status(INFER, announced(1000)),
            status(f"{service}/ServerLive"),
            status(f"{service}/ModelStreamInfer", announced(1000)),
            status("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
        )
        assert set(found) == {DEADLINE_EXCEEDED}
        assert metric(worker, 'slipway_errors_total{error="body_timeout"}') == 4

    run(make_settings(grpc_port=port, request_timeout_s=0.3, idle_timeout_s=1), work)


@pytest.mark.process
def test_a_call_that_expires_or_is_cancelled_in_the_queue_costs_no_inference(
    make_settings: MakeSettings,
) -> None:
    """Three calls wait: the service's limit, the caller's limit and a cancellation end them."""
    port, limit_s = free_port(), 1.0

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        model, message = SlowModel(worker), image_request()
        await occupied(client, model, picture(), {"content-type": "image/png"})
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            infer = channel.unary_unary(INFER)
            waiting = {
                "service": infer(message),
                "caller": infer(message, timeout=limit_s / 4),
                "cancelled": infer(message),
            }
            await until(lambda: worker.admission.num_requests == 4)
            waiting["cancelled"].cancel()
            codes = {name: (await call.code()).name for name, call in waiting.items()}
            assert codes == {
                "service": "DEADLINE_EXCEEDED",
                "caller": "DEADLINE_EXCEEDED",
                "cancelled": "CANCELLED",
            }
            assert "SLIPWAY_REQUEST_TIMEOUT_S" in await waiting["service"].details()
            model.gate.set()
            answer = service_pb2.ModelInferResponse.FromString(await infer(message))
        assert answer.model_name == "slipway"
        assert model.sizes == [1, 1]  # the one in the model from the beginning, and the last one
        assert metric(worker, "slipway_expired_total") == 3
        assert metric(worker, "slipway_client_disconnects_total") == 2

    run(make_settings(grpc_port=port, request_timeout_s=limit_s), work)


@pytest.mark.process
def test_waiting_grpc_calls_form_one_batch_and_are_counted(make_settings: MakeSettings) -> None:
    port = free_port()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        model, message = SlowModel(worker), image_request()
        first = await occupied(client, model, picture(), {"content-type": "image/png"})
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            waiting = [channel.unary_unary(INFER)(message) for _ in range(5)]
            await until(lambda: worker.admission.num_requests == 6)
            model.gate.set()
            answers = [service_pb2.ModelInferResponse.FromString(await one) for one in waiting]
        assert (await first).status_code == 200
        assert len(answers) == 5
        assert len({one.raw_output_contents[0] for one in answers}) == 1
        assert model.sizes == [1, 5]
        assert metric(worker, "slipway_batch_size_sum") == 6
        assert metric(worker, "slipway_batch_size_count") == 2
        assert metric(worker, ANSWERED.format(200)) == 5

    run(make_settings(grpc_port=port), work)


@pytest.mark.process
def test_wrong_shapes_are_invalid_arguments_and_counted(make_settings: MakeSettings) -> None:
    port = free_port()
    sent = pixels(1).tobytes()
    size = SIZE_PX
    shapes: tuple[list[int], ...] = (
        [1, size, size],
        [1, size, size, 4],
        [2, size, size, 3],
        [-1],
        [],
    )

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for shape in shapes:
                request = service_pb2.ModelInferRequest(model_name="slipway")
                request.inputs.add(name="image", datatype="UINT8", shape=shape)
                request.raw_input_contents.append(sent)
                refused = channel.unary_unary(INFER)(request.SerializeToString())
                assert await refused.code() == grpc.StatusCode.INVALID_ARGUMENT, shape
                assert "shape" in await refused.details() or "bytes" in await refused.details()
        assert metric(worker, ANSWERED.format(422)) == len(shapes)
        assert metric(worker, 'slipway_errors_total{error="tensor_mismatch"}') == len(shapes)
        assert metric(worker, "slipway_batch_size_count") == 0

    run(make_settings(grpc_port=port), work)


@pytest.mark.process
def test_health_watch_yields_the_present_status_and_each_change(
    make_settings: MakeSettings,
) -> None:
    port = free_port()

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch
            health = watch(health_pb2.HealthCheckRequest(), timeout=20)
            other = watch(health_pb2.HealthCheckRequest(service="other"), timeout=20)
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert (await other.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            third = watch(health_pb2.HealthCheckRequest(), timeout=20)
            assert await third.code() == grpc.StatusCode.UNAVAILABLE
            other.cancel()
            worker.is_draining = True
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            worker.is_draining = False
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            stop = worker.hooks["grpc_port"].stop
            assert stop
            stopping = asyncio.ensure_future(stop())
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await health.read() == grpc.aio.EOF
            await stopping

    run(make_settings(grpc_port=port, max_connections=8), work)


def mutated(message: bytes, draw: random.Random) -> bytes:
    """Return a message with some bytes changed, removed, repeated or added."""
    content = bytearray(message)
    for _ in range(draw.randrange(1, 5)):
        place = draw.randrange(len(content))
        kind = draw.randrange(4)
        if kind == 0:
            content[place] = draw.randrange(256)
        elif kind == 1:
            del content[place : place + draw.randrange(1, 20)]
        elif kind == 2:
            content[place:place] = draw.randbytes(draw.randrange(1, 20))
        else:
            content += content[place : place + 50]
        content = content or bytearray(b"\0")
    return bytes(content)


def require_mutants_refused(service: Service, message: bytes, number: int) -> None:
    """Send a message, then `number` mutants: most are refused, and none fails the service."""
    draw = random.Random(7)
    found = dict.fromkeys(("OK", "INVALID_ARGUMENT", "NOT_FOUND"), 0)
    with grpc.insecure_channel(service.address) as channel:
        call = channel.unary_unary(INFER)
        assert call(message, timeout=10)
        for _ in range(number):
            code = "OK"
            try:
                call(mutated(message, draw), timeout=10)
            except grpc.RpcError as error:
                code = error.code().name
            found[code] = found.get(code, 0) + 1
    assert found.keys() == {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}, found
    assert found["INVALID_ARGUMENT"] > number / 6, found
    assert service.client().is_server_ready()


@pytest.mark.process
@pytest.mark.parametrize("is_raw", [True, False])
def test_mutated_messages_are_refused_and_never_fail_the_service(
    images: Service, is_raw: bool
) -> None:
    require_mutants_refused(images, image_request(is_raw=is_raw), 300)


@pytest.mark.nightly(seconds=90)
def test_10_000_mutated_messages_are_refused_and_never_fail_the_service(
    tmp_path: Path,
) -> None:
    for service in started(tmp_path):
        require_mutants_refused(service, image_request(), 5_000)
        require_mutants_refused(service, image_request(is_raw=False), 5_000)


@pytest.mark.nightly(seconds=90)
def test_10_000_mutated_rows_of_a_table_are_refused_and_never_fail_the_service(
    tmp_path: Path,
) -> None:
    for service in started(tmp_path, row_classifier()):
        require_mutants_refused(service, row_request(), 10_000)


@pytest.mark.process
def test_grpc_call_with_table_rows_and_a_key_is_handled_as_over_http(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys", "alice", "caller", None)
    for service in started(tmp_path, row_classifier(), keys=tmp_path / "keys"):
        row = table_row(1)
        request = [tensor(name, *_one(value)) for name, value in row.items()]
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            service.client().infer("slipway", request)
        headers = {"authorization": f"Bearer {key}"}
        found = service.client().infer("slipway", request, headers=headers)
        answer = httpx.post(service.http.url + "/predict", json=row, headers=headers).json()
        assert found.as_numpy("label")[0].decode() == answer["label"]


def _one(value: Any) -> tuple[str, NDArray[Any]]:
    """Return the datatype and the array of a table cell."""
    if isinstance(value, str):
        return "BYTES", np.array([value.encode()], object)
    if isinstance(value, bool):
        return "BOOL", np.array([value])
    return "FP64", np.array([value], float)


@pytest.mark.unit
def test_typed_tensor_contents_are_converted_to_the_bytes_of_raw_contents() -> None:
    request = service_pb2.ModelInferRequest()
    request.inputs.add(name="a", datatype="INT16", shape=[2]).contents.int_contents.extend([1, -2])
    request.inputs.add(name="b", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"xy")
    body, head_length = http_body(request)
    assert body[head_length:] == struct.pack("<hh", 1, -2) + struct.pack("<I", 2) + b"xy"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("datatype", "field", "values", "words"),
    [
        ("INT8", "int_contents", [300], "outside INT8"),
        ("FP32", "int_contents", [3], "expected fp32_contents for FP32"),
    ],
)
def test_tensor_contents_that_do_not_fit_their_datatype_are_refused(
    datatype: str, field: str, values: list[Any], words: str
) -> None:
    request = service_pb2.ModelInferRequest()
    tensor = request.inputs.add(name="a", datatype=datatype, shape=[1])
    getattr(tensor.contents, field).extend(values)
    with pytest.raises(Refusal, match=words):
        http_body(request)


@pytest.mark.unit
def test_grpc_call_cannot_ask_for_outputs_as_json() -> None:
    asked = service_pb2.ModelInferRequest()
    asked.parameters["binary_data_output"].bool_param = False
    asked.outputs.add(name="probabilities").parameters["binary_data"].bool_param = False
    head = json.loads(http_body(asked)[0])
    assert head["parameters"] == {"binary_data_output": True}
    assert head["outputs"] == [{"name": "probabilities", "parameters": {"binary_data": True}}]


@pytest.mark.unit
def test_raw_contents_are_refused_if_their_number_differs_from_the_inputs() -> None:
    request = service_pb2.ModelInferRequest(raw_input_contents=[b"a", b"b"])
    request.inputs.add(name="a", datatype="UINT8", shape=[1])
    with pytest.raises(Refusal, match="2 contents were found, expected 1, one per input"):
        http_body(request)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"grpc_port": 3999}, "two ports of this service are 3999"),
        ({"grpc_port": 3998, "grpc_host": "0.0.0.0"}, "can be reached from other machines"),
    ],
)
def test_an_unsafe_or_taken_address_is_refused_before_the_start(
    own: dict[str, Any], words: str
) -> None:
    settings = Settings(sections=(GrpcSettings(**own),))
    with pytest.raises(SettingsError, match=words):
        require_safe_start(settings, EXTENSIONS, "127.0.0.1", 3999)
