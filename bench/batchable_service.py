"""A batchable BentoML API that makes the same prediction, written as BentoML documents it.

bench/serving_speed.py compares the service with it. `max_latency_ms` is far above the time of a
batch: with the documented 100 ms the dispatcher answers 503 under this load. PEER_WORKERS is the
number of worker processes.
"""

import os
from typing import Any

import bentoml
import numpy as np
from PIL.Image import Image as PILImage

from bench.serving_peers import MAX_BATCH_SIZE, Model
from slipway.inputs.images import image_array


@bentoml.service(
    name="batchable",
    http={"host": "127.0.0.1"},
    traffic={"timeout": 60},
    workers=int(os.environ.get("PEER_WORKERS", "1")),
)
class Batchable:
    """A BentoML service that decodes in the framework, stacks a batch, runs and answers it."""

    def __init__(self) -> None:
        self.model = Model()

    @bentoml.api(  # type: ignore[untyped-decorator]
        batchable=True, max_batch_size=MAX_BATCH_SIZE, max_latency_ms=10_000
    )
    def predict(self, images: list[PILImage]) -> list[dict[str, Any]]:
        """Return the label and probabilities of each image."""
        pixels = np.stack([image_array(image, self.model.contract) for image in images])
        return [self.model.encode(output) for output in self.model.run(pixels)]
