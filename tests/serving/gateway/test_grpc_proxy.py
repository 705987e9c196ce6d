"""The gRPC port in front of several models: Triton's client, routing, and faults of a model."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from tritonclient import grpc as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from slipway.serving.auth.keys import add_key
from slipway.serving.gateway import grpc_proxy
from slipway.serving.gateway.grpc_proxy import GrpcProxy
from tests import plain_http
from tests.serving.bundles import SIZE_PX, probabilities, row_classifier, table_row
from tests.serving.gateway.started import SETTINGS, running_gateway, write_models
from tests.serving.server import Server, free_port, until

pytestmark = pytest.mark.process
INFER = "/inference.GRPCInferenceService/ModelInfer"


class Started:
    """A gateway with a gRPC port, in front of images (which needs a key), rows and no model."""

    def __init__(self, server: Server, port: int, key: str) -> None:
        self.server, self.address = server, f"127.0.0.1:{port}"
        self.key = {"authorization": f"Bearer {key}"}

    def client(self) -> triton.InferenceServerClient:
        return triton.InferenceServerClient(self.address)


@pytest.fixture(name="gateway", scope="module")
def _gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder, port = tmp_path_factory.mktemp("gateway"), free_port()
    write_models(folder, images=None, rows=row_classifier())
    key = add_key(folder / "images/keys", "alice", "caller", None)
    limit = f"{SETTINGS}SLIPWAY_KEYS=keys\nSLIPWAY_MAX_BODY_BYTES={1 << 20}\n"
    (folder / "images/serving.env").write_text(limit)
    (folder / "missing").mkdir()
    with (folder / "models.toml").open("a") as file:
        file.write('[models.missing]\nfolder = "missing"\n')
    with running_gateway(folder, "--grpc-port", str(port)) as server:
        server.wait("/models/images/readyz")
        server.wait("/models/rows/readyz")
        yield Started(server, port, key)


def pixels() -> Any:
    return np.random.default_rng(0).integers(0, 256, (1, SIZE_PX, SIZE_PX, 3), dtype=np.uint8)


def image() -> list[triton.InferInput]:
    tensor = triton.InferInput("image", list(pixels().shape), "UINT8")
    tensor.set_data_from_numpy(pixels())
    return [tensor]


def row() -> list[triton.InferInput]:
    found = []
    for name, value in table_row(1).items():
        kind = {str: "BYTES", bool: "BOOL"}.get(type(value), "FP64")
        values = np.array([value], {"BYTES": object, "BOOL": bool, "FP64": float}[kind])
        found.append(triton.InferInput(name, [1], kind))
        found[-1].set_data_from_numpy(values)
    return found


def predicts_rows(gateway: Started) -> bool:
    return bool(gateway.client().infer("rows", row()).as_numpy("label").size == 1)


def test_one_grpc_port_routes_each_call_to_the_model_that_it_names(gateway: Started) -> None:
    with gateway.client() as client:
        found = client.infer("images", image(), headers=gateway.key)
        np.testing.assert_allclose(
            found.as_numpy("probabilities"), probabilities(pixels()), atol=1e-6
        )
        answer = plain_http.post(f"{gateway.server.url}/models/rows/predict", json=table_row(1))
        assert client.infer("rows", row()).as_numpy("label")[0].decode() == answer.json()["label"]
        assert client.get_model_metadata("images", headers=gateway.key).name == "images"
        assert client.is_model_ready("rows")
        states = {one.name: one.state for one in client.get_model_repository_index().models}
        assert client.is_server_live()
        assert client.is_server_ready()
    assert states == {"images": "READY", "rows": "READY", "missing": "UNAVAILABLE"}
    metrics = plain_http.get(f"{gateway.server.url}/metrics", headers=gateway.key).text
    assert 'slipway_gateway_requests_total{code="OK",model="rows"}' in metrics


def test_a_stream_of_grpc_is_passed_on_message_by_message(gateway: Started) -> None:
    answers: list[Any] = []
    with gateway.client() as client:
        client.start_stream(lambda result, error: answers.append(error or result))
        for _ in range(3):
            client.async_stream_infer("rows", row())
        client.stop_stream()
    assert [answer.as_numpy("label").size for answer in answers] == [1, 1, 1]


def test_refusals_of_gateway_and_models_have_their_codes(gateway: Started) -> None:
    for model, code in (
        ("other", "NOT_FOUND"),
        ("images", "UNAUTHENTICATED"),
        ("missing", "UNAVAILABLE"),
    ):
        with pytest.raises(InferenceServerException) as raised:
            gateway.client().infer(model, image())
        assert raised.value.status() == f"StatusCode.{code}", raised.value
    with grpc.insecure_channel(gateway.address) as channel:
        for path, content, status in (
            (INFER, b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
            (f"{INFER}s", b"", grpc.StatusCode.UNIMPLEMENTED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(path)(content)
            assert refused.value.code() == status
    assert predicts_rows(gateway)


def test_a_message_above_the_limit_of_its_model_or_of_all_is_refused(gateway: Started) -> None:
    above_its_own = service_pb2.ModelInferRequest(model_name="images")
    above_its_own.raw_input_contents.append(bytes(2 << 20))
    with grpc.insecure_channel(gateway.address, [("grpc.max_send_message_length", -1)]) as channel:
        for content in (above_its_own.SerializeToString(), bytes(1 << 30)):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(INFER)(content)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert predicts_rows(gateway)


def test_standard_health_check_reports_the_whole_and_each_model(gateway: Started) -> None:
    status = health_pb2.HealthCheckResponse
    with grpc.insecure_channel(gateway.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        found = [
            check(health_pb2.HealthCheckRequest(service=name)).status
            for name in ("", "images", "missing")
        ]
        with pytest.raises(grpc.RpcError, match="no model 'other'"):
            check(health_pb2.HealthCheckRequest(service="other"))
    assert found == [status.SERVING, status.SERVING, status.NOT_SERVING]


def test_reflection_describes_the_protocol_and_the_health_check(gateway: Started) -> None:
    with grpc.insecure_channel(gateway.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        names = set(database.get_services())
        service = DescriptorPool(database).FindServiceByName("inference.GRPCInferenceService")
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} < names
    assert "ModelInfer" in service.methods_by_name


def looks_during(work: Callable[[GrpcProxy, list[bool]], Awaitable[None]]) -> int:
    """Let `work` watch a proxy of a model whose readiness it changes; count the looks at it."""
    looks = 0

    async def main() -> None:
        ready = [True]

        async def states() -> dict[str, bool]:
            nonlocal looks
            looks += 1
            return {"only": ready[0]}

        await work(GrpcProxy({}, states, lambda *_: None), ready)

    asyncio.run(asyncio.wait_for(main(), 20))
    return looks


def parsed(message: bytes) -> int:
    return int(health_pb2.HealthCheckResponse.FromString(message).status)


@pytest.mark.unit
def test_a_watch_ends_with_not_serving_when_the_port_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_proxy, "_WATCH_S", 0.01)

    async def work(proxy: GrpcProxy, ready: list[bool]) -> None:
        watch = proxy._watch(b"")
        found = [parsed(await anext(watch))]
        for ready[0] in (False, True):
            found.append(parsed(await anext(watch)))
        await proxy.close()
        found += [parsed(message) async for message in watch]
        assert found == [1, 2, 1, 2]

    assert looks_during(work) >= 3


@pytest.mark.unit
def test_watches_share_one_look_and_those_above_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_proxy, "_MAX_CALLS", 12)

    async def work(proxy: GrpcProxy, _: list[bool]) -> None:
        watches = [proxy._watch(b"") for _ in range(4)]
        found = [parsed(await anext(watch)) for watch in watches[:3]]
        assert found == [1, 1, 1]
        with pytest.raises(Exception, match="3 callers watch, the limit"):
            await anext(watches[3])
        await watches[0].aclose()
        assert parsed(await anext(proxy._watch(b""))) == 1

    assert looks_during(work) == 1


def test_a_deadline_ends_the_call_to_a_model_that_hangs_and_no_other(gateway: Started) -> None:
    services = psutil.Process(gateway.server.process.pid).children()
    service = next(one for one in services if one.cwd().endswith("/images"))
    worker = service.children()[0]
    worker.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(InferenceServerException) as raised:
            gateway.client().infer("images", image(), headers=gateway.key, client_timeout=0.5)
        assert raised.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        with pytest.raises(InferenceServerException, match="images did not answer in time"):
            gateway.client().infer("images", image(), headers=gateway.key)
        assert predicts_rows(gateway)
    finally:
        worker.send_signal(signal.SIGCONT)


def test_calls_and_health_watch_follow_a_model_through_a_restart(gateway: Started) -> None:
    status = health_pb2.HealthCheckResponse
    services = psutil.Process(gateway.server.process.pid).children()
    service = next(one for one in services if one.cwd().endswith("/rows"))
    codes = []

    def answers() -> bool:
        try:
            return predicts_rows(gateway)
        except InferenceServerException as error:
            codes.append(error.status())
            return False

    with grpc.insecure_channel(gateway.address) as channel:
        rows, whole, other = (
            health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=name), timeout=90
            )
            for name in ("rows", "", "other")
        )
        assert next(other).status == status.SERVICE_UNKNOWN
        assert next(whole).status == status.SERVING
        assert next(rows).status == status.SERVING
        os.kill(service.pid, signal.SIGKILL)
        until(lambda: not answers())
        until(answers, 60)
        assert [next(rows).status for _ in range(2)] == [status.NOT_SERVING, status.SERVING]
    assert set(codes) == {"StatusCode.UNAVAILABLE"}


def test_the_option_grpc_port_is_refused_without_a_file_of_models(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from slipway.cli.answers import serve

    found = CliRunner().invoke(serve, ["--grpc-port", "4000"])
    assert found.exit_code == 2
    assert "--grpc-port needs --models" in found.output
