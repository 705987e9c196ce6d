"""Sends the test rows to the running service over gRPC, with the client library of Triton.

The rows are those of the HTTP hop, as tensors of the Open Inference Protocol. Their datatypes come
from the service's metadata, as for any client.
"""

import json
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle
from slipway.export.certification.http_hop import Predictions, RowPayload, ServiceClient
from slipway.export.certification.service_process import ANSWER_DEADLINE_S
from slipway.kinds.registry import input_kind
from slipway.system.errors import ParityError

PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "tritonclient")
_MODEL = "slipway"
_BYTES = "BYTES"


def why_no_grpc(packages: Sequence[str] = PACKAGES) -> str | None:
    """Return the reason why gRPC requests are not possible here; None if they are."""
    is_complete = all(find_spec(name) for name in packages)
    return None if is_complete else "needs `pip install 'slipway-ml[grpc]'`"


class GrpcClient(ServiceClient):
    """Requests predictions over gRPC from the service at `address`."""

    backend = "grpc"  # backend of its executions

    def __init__(self, url: str, address: str, bundle: LoadedBundle, classes: list[str]) -> None:
        from tritonclient import grpc

        super().__init__(url, bundle, classes)
        self._triton = grpc
        self._over_grpc = grpc.InferenceServerClient(address)
        self._datatypes: dict[str, str] = {}  # datatypes by name of the input

    def close(self) -> None:
        """Close the connections."""
        self._over_grpc.close()
        super().close()

    def predictions(
        self, what: str, payloads: list[RowPayload], is_list: bool = False
    ) -> Predictions:
        """Request the predictions of the rows, and convert the tensors to the format of HTTP.

        BOOL has no missing value, so rows that lack different booleans need separate requests.
        """
        if not self._datatypes:
            metadata = self._call(what, self._over_grpc.get_model_metadata)
            self._datatypes = {one.name: one.datatype for one in metadata.inputs}
        rows = [self._cells(payload) for payload in payloads]
        places: dict[tuple[str, ...], list[int]] = {}  # places of rows with the same inputs
        for place, row in enumerate(rows):
            places.setdefault(tuple(row), []).append(place)
        found: dict[int, dict[str, Any]] = {}
        for names, chosen in places.items():
            if not names:  # a row without any value, which the protocol cannot express
                for place in chosen:
                    _, (found[place],) = super().predictions(what, [payloads[place]])
                continue
            tensors = [
                self._tensor(name, [rows[place][name] for place in chosen]) for name in names
            ]
            result = self._call(what, self._over_grpc.infer, inputs=tensors)
            response = result.get_response()
            self.check_version(response.model_version, what)
            outputs = {one.name: result.as_numpy(one.name) for one in response.outputs}
            found |= zip(chosen, self._described(what, outputs, len(chosen)), strict=True)
        predictions = [found[place] for place in range(len(payloads))]
        return predictions, predictions

    def _call(self, what: str, method: Callable[..., Any], **arguments: Any) -> Any:
        from tritonclient.utils import InferenceServerException

        try:
            return method(model_name=_MODEL, client_timeout=ANSWER_DEADLINE_S, **arguments)
        except InferenceServerException as error:
            raise ParityError(f"{what}: the service gave no answer over gRPC ({error}).") from error

    def _cells(self, payload: RowPayload) -> dict[str, Any]:
        """Return the value of each input by name: an image's bytes, or a cell of the row."""
        if input_kind(self.bundle.manifest.input.kind).takes_files:
            return dict.fromkeys(self._datatypes, payload.content)
        row = json.loads(payload.content)
        if not isinstance(row, dict):
            return dict.fromkeys(self._datatypes, row)
        return {
            name: row.get(name)
            for name, datatype in self._datatypes.items()
            if datatype != "BOOL" or row.get(name) is not None
        }

    def _tensor(self, name: str, column: list[Any]) -> Any:
        from tritonclient.utils import triton_to_np_dtype

        datatype = self._datatypes[name]
        values: NDArray[Any] = np.empty(len(column), object)
        if datatype == _BYTES:
            values[:] = [_bytes(cell) for cell in column]
        elif datatype == "BOOL":
            values = np.array(column, bool)
        else:
            numbers = [math.nan if cell is None else cell for cell in column]
            values = np.array(numbers, triton_to_np_dtype(datatype))
        tensor = self._triton.InferInput(name, list(values.shape), datatype)
        tensor.set_data_from_numpy(values)
        return tensor

    def _described(
        self, what: str, outputs: dict[str, NDArray[Any]], num_rows: int
    ) -> list[dict[str, Any]]:
        """Return one prediction per row.

        Computes the intervals, which the protocol does not carry.
        """
        labels = self.bundle.manifest.output.labels
        columns = {name: values.tolist() for name, values in outputs.items()}
        try:
            predictions = [
                {name: column[row] for name, column in columns.items()} for row in range(num_rows)
            ]
            for prediction in predictions:
                if not labels:
                    (prediction["value"],) = prediction["value"]
                    interval = self.calibration.interval(prediction["value"])
                    prediction["interval"] = interval and list(interval)
                    continue
                named = zip(labels, prediction["probabilities"], strict=True)
                prediction["probabilities"] = dict(named)
                for name in {"prediction_set", "labels"} & columns.keys():
                    given = zip(labels, prediction[name], strict=True)
                    prediction[name] = [label for label, is_given in given if is_given]
                if "label" in prediction:
                    prediction["label"] = prediction["label"].decode()
        except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise ParityError(
                f"{what}: the outputs over gRPC are {', '.join(outputs)}, which are not in the "
                f"format of docs/reference/serving.md ({error!r})."
            ) from error
        return predictions


def _bytes(cell: Any) -> bytes:
    """Encode a cell as bytes; a missing text becomes empty."""
    return cell if isinstance(cell, bytes) else ("" if cell is None else str(cell)).encode()
