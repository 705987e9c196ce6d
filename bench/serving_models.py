"""Certified bundles for bench/serving_speed.py, with random weights.

They are resnet18 at 224 px, a small network at 28 px, and a transformer on the tokens of messages.
"""

import csv
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from slipway.artifacts.bundle import LoadedBundle, OutputContract
from slipway.data.texts.packing import learned_tokenizer
from slipway.export.graphs.graph import export_graph
from slipway.inputs.contract import InputContract
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract
from slipway.system.assets import asset
from slipway.training.networks.networks import NetworkSpec, build_network
from tests.calibrations import calibrated
from tests.serving.bundles import certify, write_bundle

CLASSES = [f"class {number}" for number in range(10)]
LARGEST_BATCH = 64
NUM_TOKENS = 4000


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


@cache
def messages() -> list[str]:
    """Return the embedded English messages."""
    with asset("data/demo/messages.csv").open(newline="", encoding="utf-8") as file:
        return [row["text"] for row in csv.DictReader(file)]


def write_text(folder: Path) -> LoadedBundle:
    """Write `folder`/bundle and its certificate, of a transformer as large as small encoders."""
    torch.manual_seed(7)
    taken = TextContract(
        kind="texts",
        columns=["text"],
        max_bytes=1024,
        max_characters=None,
        tokenizer=learned_tokenizer(messages(), NUM_TOKENS),
        max_tokens=128,
    )
    arguments = {"width": 384, "num_layers": 6, "num_heads": 12, "patch": 1, "dropout": 0.0}
    spec = NetworkSpec(
        task="text_classification",
        name="small_transformer",
        arguments=arguments,
        classes=CLASSES,
        input=taken,
        mean=[],
        std=[],
        target_scale=None,
    )
    return _write(folder, build_network(spec), taken)


def _write(folder: Path, network: nn.Module, taken: InputContract) -> LoadedBundle:
    output = OutputContract(kind="probabilities", labels=CLASSES)
    rows = taken.example_rows(64)
    graph = export_graph(
        calibrated(network.eval(), rows), taken, output, opset=18, max_batch_size=LARGEST_BATCH
    )
    model = onnx.load_model_from_string(graph)
    names = {"input_name": model.graph.input[0].name, "output_name": model.graph.output[0].name}
    bundle = write_bundle(
        folder / "bundle", model, input=taken, output=output, max_batch_size=LARGEST_BATCH, **names
    )
    certify(folder / "certificate.json", bundle)
    return bundle
