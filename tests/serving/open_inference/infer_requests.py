"""Requests of the Open Inference Protocol."""

from typing import Any

import httpx

from slipway.serving.http.responses import ERRORS

INFER = "/v2/models/slipway/infer"
HEAD_LENGTH = "inference-header-content-length"


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error in the protocol's format, in which `error` is a text."""
    content: dict[str, Any] = response.json()
    assert list(content) == ["error", "code", "field", "request_id"]
    assert response.status_code == ERRORS[content["code"]]
    assert response.headers["x-request-id"] == content["request_id"]
    assert len(content["error"]) > 20
    return content


# Requests that the Triton client would not send.


def pixels_in_json(**changes: Any) -> dict[str, Any]:
    inputs = {"name": "image", "shape": [1, 2, 2, 3], "datatype": "UINT8", "data": list(range(12))}
    return {"inputs": [inputs | changes]}
