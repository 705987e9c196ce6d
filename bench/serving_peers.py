"""A FastAPI server that makes the same prediction, and an ASGI application that does nothing.

`python -m bench.serving_peers NAME PORT` runs one for bench/serving_speed.py; LitServe is in
bench/litserve_peer.py. They may use another Python that has fastapi, python-multipart, litserve,
uvicorn, uvloop, httptools, onnxruntime and the packages that `slipway.inputs.images` imports.
PEER_BUNDLE is the folder of the bundle, PEER_CONTRACT its input contract; PEER_INPUT and
PEER_OUTPUT name the graph's tensors. Each server follows its own documentation. All use Slipway's
decoder, so that only the frameworks are compared.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.inputs.images import ImageContract, array_from_bytes

MAX_BATCH_SIZE = 32


class Model:
    """The graph of a bundle in ONNX Runtime, with the settings of `slipway.runtimes.runtime`."""

    def __init__(self) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        path = Path(os.environ["PEER_BUNDLE"]) / "model_fp32.onnx"
        self.session = onnxruntime.InferenceSession(
            path.read_bytes(), options, providers=["CPUExecutionProvider"]
        )
        self.contract = ImageContract.model_validate_json(os.environ["PEER_CONTRACT"])

    def decode(self, payload: bytes) -> NDArray[np.uint8]:
        return array_from_bytes(payload, self.contract)

    def run(self, batch: NDArray[np.uint8]) -> NDArray[np.float32]:
        outputs: NDArray[np.float32] = self.session.run(
            [os.environ["PEER_OUTPUT"]], {os.environ["PEER_INPUT"]: batch}
        )[0]
        return outputs

    @staticmethod
    def encode(output: NDArray[np.float32]) -> dict[str, Any]:
        return {"label": int(output.argmax()), "probabilities": output.tolist()}


async def empty(scope: Any, receive: Any, send: Any) -> None:
    """Read the body and answer two bytes."""
    if scope["type"] == "lifespan":
        return
    while (await receive()).get("more_body", False):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


def serve_empty(port: int) -> None:
    """Serve the empty application: uvicorn with httptools and uvloop, without an access log."""
    import uvicorn

    uvicorn.run(
        empty,
        port=port,
        http="httptools",
        loop="uvloop",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


def serve_fastapi(port: int) -> None:
    """Serve one row at a time in FastAPI's pool of threads, with uvicorn as in `serve_empty`."""
    import fastapi  # in a Python of its own
    import uvicorn

    application, model = fastapi.FastAPI(), Model()

    @application.get("/readyz")
    def ready() -> dict[str, str]:
        return {}

    # Without annotations of fastapi's in this module's scope, which is imported without it as well.
    def predict(image):  # type: ignore[no-untyped-def]
        return model.encode(model.run(model.decode(image.file.read())[np.newaxis])[0])

    predict.__annotations__["image"] = fastapi.UploadFile
    application.post("/predict")(predict)
    uvicorn.run(
        application,
        port=port,
        http="httptools",
        loop="uvloop",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    {"empty": serve_empty, "fastapi": serve_fastapi}[sys.argv[1]](int(sys.argv[2]))
