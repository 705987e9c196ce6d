"""An ordinary BentoML API that makes the same prediction, for bench/serving_overhead.py."""

import os
from pathlib import Path
from typing import Annotated, Any

import bentoml
from bentoml.validators import ContentType

from slipway.artifacts.bundle import load_bundle
from slipway.inputs.images import ImageContract, array_from_bytes
from slipway.runtimes.runtime import open_onnx


@bentoml.service(name="stock", http={"host": "127.0.0.1"}, traffic={"timeout": 10})
class Stock:
    """A BentoML service that decodes an image, runs one row and answers."""

    def __init__(self) -> None:
        self.bundle = load_bundle(Path(os.environ["STOCK_BUNDLE"]))
        assert isinstance(self.bundle.manifest.input, ImageContract), "the bench is about images"
        self.contract = self.bundle.manifest.input
        self.runner = open_onnx(
            self.bundle.model_bytes("fp32"),
            variant="fp32",
            precision="fp32",
            provider="cpu",
            num_threads=0,
        )

    @bentoml.api  # type: ignore[untyped-decorator]
    def predict(self, image: Annotated[Path, ContentType("image/*")]) -> dict[str, Any]:
        """Return `label` and `probabilities` of one image."""
        outputs = self.runner.run(
            array_from_bytes(image.read_bytes(), self.contract)[None]
        ).outputs[0]
        labels = self.bundle.manifest.output.labels
        probabilities = dict(zip(labels, outputs.tolist(), strict=True))
        return {
            "label": labels[int(outputs.argmax())],
            "probabilities": probabilities,
            "model_version": self.bundle.version,
        }
