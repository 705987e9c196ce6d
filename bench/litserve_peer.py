"""A LitServe API that makes the same prediction, written as LitServe documents it.

`python -m bench.litserve_peer PORT` runs it for bench/serving_speed.py. It waits up to 5 ms for
batches of at most 32. PEER_WORKERS is the number of its processes that serve, and of those that
predict. The class is in this module because LitServe's processes import it.
"""

import os
import sys
from typing import Any

import litserve  # type: ignore[import-not-found]  # in a Python of its own
import numpy as np
from fastapi import Request  # in a Python of its own
from numpy.typing import NDArray

from bench.serving_peers import MAX_BATCH_SIZE, Model


class Api(litserve.LitAPI):  # type: ignore[misc]  # the package is not installed here
    """A LitServe API that decodes each request, runs a batch, and encodes each answer."""

    def setup(self, device: str) -> None:
        self.model = Model()

    def decode_request(self, request: Request) -> NDArray[np.uint8]:
        return self.model.decode(request["image"].file.read())

    def batch(self, inputs: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        return np.stack(inputs)

    def predict(self, batch: NDArray[np.uint8]) -> NDArray[np.float32]:
        return self.model.run(batch)

    def unbatch(self, output: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return list(output)

    def encode_response(self, output: NDArray[np.float32]) -> dict[str, Any]:
        return self.model.encode(output)


if __name__ == "__main__":
    api = Api(max_batch_size=MAX_BATCH_SIZE, batch_timeout=0.005, api_path="/predict")
    num_workers = int(os.environ.get("PEER_WORKERS", "1"))
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=num_workers)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        generate_client_file=False,
        log_level="warning",
        num_api_servers=num_workers,
    )
