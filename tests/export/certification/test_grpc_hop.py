"""The gRPC client of the certificate, with a fake gRPC server that predicts like the service."""

import json
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from slipway.artifacts.bundle import LoadedBundle
from slipway.export.certification import grpc_hop
from slipway.export.certification.grpc_hop import GrpcClient, why_no_grpc
from slipway.export.certification.http_hop import RowPayload
from slipway.inputs.columns import ColumnContract
from slipway.system.errors import ParityError
from tests.serving.bundles import LABELS, column, write_inert_bundle

MIXED = ColumnContract(
    kind="columns",
    columns=[
        column("x", required=True, has_missing=True),
        column("flag", "boolean", required=True, has_missing=True),
        column("city", "category", required=True, has_missing=True),
    ],
)
DATATYPES = {"x": "FP64", "flag": "BOOL", "city": "BYTES"}
Outputs = dict[str, tuple[str, list[int], bytes]]
Answer = Callable[[list[float]], Outputs]


def doubles(contents: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(contents) // 8}d", contents))


def values(numbers: list[float]) -> Outputs:
    """Return twice the value of `x` for each row."""
    count = len(numbers)
    return {
        "value": ("FP32", [count, 1], struct.pack(f"<{count}f", *(2 * one for one in numbers))),
        "ood_score": ("FP32", [count], struct.pack(f"<{count}f", *[0.5] * count)),
        "is_ood": ("BOOL", [count], bytes(count)),
    }


def probabilities(numbers: list[float]) -> Outputs:
    """Return probabilities that are 1 for the first label."""
    count = len(numbers)
    text = LABELS[0].encode()
    return values(numbers) | {
        "label": ("BYTES", [count], (struct.pack("<I", len(text)) + text) * count),
        "probabilities": ("FP32", [count, 3], struct.pack("<3f", 1, 0, 0) * count),
        "prediction_set": ("BOOL", [count, 3], b"\1\0\0" * count),
    }


@contextmanager
def serving(
    bundle: LoadedBundle, answer: Answer, version: str | None = None
) -> Iterator[tuple[GrpcClient, list[dict[str, int]]]]:
    """Yield a client of a fake server, and a list of the rows of each tensor per request."""
    asked: list[dict[str, int]] = []

    def metadata(request: Any, context: Any) -> Any:
        response = service_pb2.ModelMetadataResponse(name=request.name)
        for name, datatype in DATATYPES.items():
            response.inputs.add(name=name, datatype=datatype, shape=[-1])
        return response

    def infer(request: Any, context: Any) -> Any:
        asked.append({one.name: one.shape[0] for one in request.inputs})
        response = service_pb2.ModelInferResponse(model_version=version or bundle.version)
        for name, (datatype, shape, contents) in answer(
            doubles(request.raw_input_contents[0])
        ).items():
            response.outputs.add(name=name, datatype=datatype, shape=shape)
            response.raw_output_contents.append(contents)
        return response

    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            handle,
            getattr(service_pb2, f"{name}Request").FromString,
            getattr(service_pb2, f"{name}Response").SerializeToString,
        )
        for name, handle in (("ModelMetadata", metadata), ("ModelInfer", infer))
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    classes = bundle.manifest.output.labels
    try:
        address = f"127.0.0.1:{port}"
        with GrpcClient("http://127.0.0.1:9", address, bundle, classes) as client:
            yield client, asked
    finally:
        server.stop(None).wait()


def rows(*contents: dict[str, Any]) -> list[RowPayload]:
    return [
        RowPayload(place, f"id{place}", json.dumps(content).encode(), "application/json")
        for place, content in enumerate(contents)
    ]


def test_grpc_client_returns_value_and_ood_score_for_a_numeric_target(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path, labels=[], contract=MIXED)
    with serving(bundle, values) as (client, asked):
        (payload,) = rows({"x": 3.0, "flag": True, "city": "Köln"})
        assert client.predict(payload).tolist() == [6.0, 0.5]
    assert asked == [{"x": 1, "flag": 1, "city": 1}]


def test_grpc_client_sends_rows_without_a_boolean_separately_and_keeps_the_order(
    tmp_path: Path,
) -> None:
    bundle = write_inert_bundle(tmp_path, labels=[], contract=MIXED)
    with serving(bundle, values) as (client, asked):
        group = rows(
            {"x": 1.0, "flag": True, "city": None},
            {"x": 2.0, "flag": None, "city": "Bonn"},
            {"x": 3.0, "flag": False, "city": "Bonn"},
        )
        assert client.predict_group(group)[:, 0].tolist() == [2.0, 4.0, 6.0]
    assert asked == [{"x": 2, "flag": 2, "city": 2}, {"x": 1, "city": 1}]


def test_grpc_client_refuses_predictions_whose_label_and_probabilities_differ(
    tmp_path: Path,
) -> None:
    bundle = write_inert_bundle(tmp_path, contract=MIXED)
    (payload,) = rows({"x": 1.0, "flag": True, "city": "Bonn"})
    with serving(bundle, probabilities) as (client, _):
        assert client.predict(payload).tolist() == [1.0, 0.0, 0.0, 0.5]
    swapped = struct.pack("<3f", 0, 1, 0)
    with (
        serving(
            bundle, lambda x: probabilities(x) | {"probabilities": ("FP32", [1, 3], swapped)}
        ) as (client, _),
        pytest.raises(ParityError, match=r"row id0: the service answered .*not in the format"),
    ):
        client.predict(payload)
    with (
        serving(bundle, values) as (client, _),
        pytest.raises(ParityError, match="the outputs over gRPC are value, ood_score, is_ood"),
    ):
        client.predict(payload)


def test_grpc_client_refuses_another_model_and_an_unreachable_service(tmp_path: Path) -> None:
    bundle = write_inert_bundle(tmp_path, labels=[], contract=MIXED)
    (payload,) = rows({"x": 1.0, "flag": True, "city": "Bonn"})
    with (
        serving(bundle, values, version="other") as (client, _),
        pytest.raises(ParityError, match="answered as model 'other'"),
    ):
        client.predict(payload)
    with (
        GrpcClient("http://127.0.0.1:9", "127.0.0.1:9", bundle, []) as client,
        pytest.raises(ParityError, match="row id0: the service gave no answer over gRPC"),
    ):
        client.predict(payload)


def test_why_no_grpc_names_the_installation_of_a_missing_package() -> None:
    assert why_no_grpc() is None
    reason = why_no_grpc((*grpc_hop.PACKAGES, "no_such_package"))
    assert reason == "needs `pip install 'slipway-ml[grpc]'`"
