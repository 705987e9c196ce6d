"""Certified bundles for bench/serving_speed.py, with random weights.

They are resnet18 at 224 px and a small network at 28 px.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from slipway.artifacts.bundle import LoadedBundle, OutputContract
from slipway.export.graphs.graph import export_graph
from slipway.inputs.images import ImageContract
from slipway.training.networks.networks import NetworkSpec, build_network
from tests.calibrations import calibrated
from tests.serving.bundles import certify, write_bundle

CLASSES = [f"class {number}" for number in range(10)]
LARGEST_BATCH = 64


class SmallCnn(nn.Module):
    """Two strided convolutions and a linear layer on grey 28 px images: 78,000 multiplications."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(16 * 7 * 7, len(CLASSES))

    def forward(self, image: Tensor) -> Tensor:
        """Map images (rows, 28, 28, 1) uint8 to logits (rows, 10)."""
        logits: Tensor = self.head(self.features(image.to(torch.float32).permute(0, 3, 1, 2) / 255))
        return logits


def contract(size_px: int, channels: Any) -> ImageContract:
    """Return a contract under which images of the right size stay unchanged."""
    return ImageContract(
        kind="images",
        transform=None,
        size_px=size_px,
        channels=channels,
        resize_mode="stretch",
        interpolation="bilinear",
        max_pixels=10**6,
    )


def write_small(folder: Path) -> LoadedBundle:
    """Write `folder`/bundle and its certificate, of the small network."""
    torch.manual_seed(7)
    return _write(folder, SmallCnn(), contract(28, 1))


def write_large(folder: Path) -> LoadedBundle:
    """Write `folder`/bundle and its certificate, of resnet18 for ten classes."""
    torch.manual_seed(7)
    taken = contract(224, 3)
    facts: dict[str, Any] = {
        "mean": [0.49, 0.48, 0.45],
        "std": [0.25, 0.24, 0.26],
        "target_scale": None,
    }
    spec = NetworkSpec(
        task="image_classification",
        name="timm/resnet18",
        arguments={},
        classes=CLASSES,
        input=taken,
        **facts,
    )
    return _write(folder, build_network(spec), taken)


def _write(folder: Path, network: nn.Module, taken: ImageContract) -> LoadedBundle:
    output = OutputContract(kind="probabilities", labels=CLASSES)
    pixels = np.random.default_rng(7).integers(0, 256, (64, *taken.shape), dtype=np.uint8)
    graph = export_graph(
        calibrated(network.eval(), pixels), taken, output, opset=18, max_batch_size=LARGEST_BATCH
    )
    model = onnx.load_model_from_string(graph)
    names = {"input_name": model.graph.input[0].name, "output_name": model.graph.output[0].name}
    bundle = write_bundle(
        folder / "bundle", model, input=taken, output=output, max_batch_size=LARGEST_BATCH, **names
    )
    certify(folder / "certificate.json", bundle)
    return bundle
