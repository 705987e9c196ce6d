"""Requests with one row of numbers: a JSON list."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle
from slipway.serving.http.responses import Refusal
from slipway.serving.http.routes import Request
from slipway.serving.open_inference.tensors import Tensor, mismatch
from slipway.serving.requests.bodies import read_json
from slipway.serving.requests.decoding import Decoded
from slipway.serving.requests.payload import Payload

from .series import SeriesContract

ACCEPTED = "send one row as a JSON list of numbers"


async def receive_series(
    request: Request, max_bytes: int, max_items: int, require_room: Callable[[], None]
) -> Callable[[], Payload]:
    text = await read_json(request, max_bytes, ACCEPTED, require_room)
    return lambda: Payload("series", (text,))


class SeriesDecoder:
    def __init__(self, contract: SeriesContract, max_rows: int) -> None:
        self._contract = contract

    async def decode(self, *items: bytes) -> Decoded:
        row = np.array(json.loads(items[0]), np.float32)
        if row.shape != self._contract.shape:
            raise Refusal("not_a_row", f"{row.shape} was found; {ACCEPTED}", field="series")
        return Decoded(row[np.newaxis], is_list=False)

    def reader(self, items: Sequence[bytes]) -> Callable[[], NDArray[Any]] | None:
        return None

    def close(self) -> None:
        pass


class SeriesApi:
    summary = "The value of one series."
    errors = ("not_a_row",)

    def __init__(self, contract: SeriesContract) -> None:
        self._contract = contract

    def describe(self) -> dict[str, Any]:
        return self._contract.model_dump(mode="json")

    def content(self, max_items: int | None = None) -> dict[str, Any]:
        length = self._contract.length
        row = {"type": "array", "items": {"type": "number"}}
        return {"application/json": row | {"minItems": length, "maxItems": length}}

    def curl(self) -> str:
        row = json.dumps([0.0] * self._contract.length)
        return f"-H 'content-type: application/json' -d '{row}'"

    def example_bodies(self, bundle: LoadedBundle, most: int) -> tuple[list[bytes], str]:
        rows = self._contract.example_rows(most)
        return [json.dumps(row.tolist()).encode() for row in rows], "random series"


def describe_tensors(contract: SeriesContract) -> list[dict[str, Any]]:
    return [{"name": "series", "datatype": "FP32", "shape": [1, contract.length]}]


def read_tensors(
    inputs: list[Tensor], contract: SeriesContract, max_items: int, max_rows: int
) -> tuple[bytes, ...]:
    if inputs[0].shape != (1, contract.length):
        raise mismatch(f"its shape is {list(inputs[0].shape)}", "series")
    return (json.dumps(inputs[0].values[0].tolist()).encode(),)
