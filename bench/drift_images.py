"""Parts of bench/drift_laws.py: real images, their faults, a small model of them, and tables."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.uncertainty import Answers, OODThreshold
from slipway.drift.features import extract
from slipway.drift.reference import Reference
from slipway.inputs.images import ImageContract
from tests.calibrations import CALIBRATION
from tests.drift.populations import ReferenceRows, build_reference

DIGITS = Path("data/demo/digits.parquet")
CIFAR10 = Path("../shared/data/cifar10/train.parquet")

Pixels = NDArray[np.uint8]


def table(header: list[str], lines: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    rows = [header, ["---"] * len(header), *[[str(cell) for cell in line] for line in lines]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def read_images(path: Path, size_px: int, channels: int, num_rows: int) -> tuple[Pixels, list[str]]:
    content = pq.read_table(path)
    chosen = np.random.default_rng(5).permutation(len(content))[:num_rows]
    column = content["image"].take(chosen).to_pylist()
    payloads = [cell["bytes"] if isinstance(cell, dict) else cell for cell in column]
    mode = "L" if channels == 1 else "RGB"
    pictures = [
        Image.open(io.BytesIO(payload))
        .convert(mode)
        .resize((size_px, size_px), Image.Resampling.BILINEAR)
        for payload in payloads
    ]
    pixels = np.stack(
        [np.asarray(picture, np.uint8).reshape(size_px, size_px, channels) for picture in pictures]
    )
    return pixels, content["label"].take(chosen).to_pylist()


def blurred(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Blur images by a Gaussian of one pixel."""
    flat = [picture[..., 0] if picture.shape[-1] == 1 else picture for picture in pixels]
    found = [
        np.asarray(Image.fromarray(picture).filter(ImageFilter.GaussianBlur(1))) for picture in flat
    ]
    return np.stack(found).reshape(pixels.shape)


def noisy(pixels: Pixels, random: np.random.Generator) -> Pixels:
    """Add Gaussian noise of 20 grey levels to images."""
    return np.clip(np.rint(pixels + random.normal(0, 20, pixels.shape)), 0, 255).astype(np.uint8)


def inverted(pixels: Pixels, random: np.random.Generator) -> Pixels:
    return 255 - pixels


class Model(NamedTuple):
    """A small classifier: principal components, logistic regression, distance as OOD score."""

    components: PCA
    classifier: LogisticRegression
    threshold: float

    def answer(self, pixels: Pixels) -> Answers:
        features = self.components.transform(_flat(pixels))
        scores = np.sqrt(np.square(features).mean(axis=1))  # the components are whitened
        return Answers(
            self.classifier.predict_proba(features).astype(np.float32), scores.astype(np.float32)
        )


def _flat(pixels: Pixels) -> NDArray[np.float32]:
    flat: NDArray[np.float32] = pixels.reshape(len(pixels), -1).astype(np.float32) / np.float32(255)
    return flat


def train_model(pixels: Pixels, targets: NDArray[np.int64], held: Pixels) -> Model:
    components = PCA(n_components=min(48, pixels[0].size // 4), whiten=True, random_state=0).fit(
        _flat(pixels)
    )
    classifier = LogisticRegression(C=0.05, max_iter=300).fit(
        components.transform(_flat(pixels)), targets
    )
    model = Model(components, classifier, 0.0)
    return model._replace(threshold=float(np.quantile(model.answer(held).scores, 0.99)))


class RealData(NamedTuple):
    """Real images, their model and reference, and the images from which traffic is drawn."""

    contract: ImageContract
    output: OutputContract
    model: Model
    reference: Reference
    pixels: Pixels
    targets: NDArray[np.int64]

    def features(self, pixels: Pixels) -> NDArray[np.float32]:
        return extract(self.contract, pixels, *self.model.answer(pixels))


def real_data(path: Path, size_px: int, channels: int, num_rows: int) -> RealData:
    """Read real images: 70 % train the model, 15 % validate it; the others are the traffic."""
    return divided(*read_images(path, size_px, channels, num_rows), 0.7)


def divided(pixels: Pixels, labels: Sequence[str], learned: float) -> RealData:
    """Divide rows: the fraction `learned` trains, 15 % validate, the rest is traffic."""
    names = sorted(set(labels))
    targets = np.array([names.index(label) for label in labels])
    first, second = int(learned * len(pixels)), int((learned + 0.15) * len(pixels))
    model = train_model(pixels[:first], targets[:first], pixels[first:second])
    shape = {
        "kind": "images",
        "size_px": pixels.shape[1],
        "channels": pixels.shape[3],
        "resize_mode": "stretch",
        "interpolation": "bilinear",
    }
    contract = ImageContract.model_validate(shape | {"max_pixels": 10**6, "transform": None})
    output = OutputContract(kind="probabilities", labels=names)
    ood = OODThreshold(
        fraction=0.01,
        threshold=model.threshold,
        rows=second - first,
        layer="components",
        statistics_sha256="0" * 64,
    )
    calibration = CALIBRATION.model_copy(update={"ood": ood})
    held, truth = pixels[first:second], targets[first:second].astype(np.float64)
    reference = build_reference(
        contract,
        output,
        calibration,
        ReferenceRows(held, *model.answer(held), truth),
        [pixels[:first]],
    )
    start = (
        0 if len(pixels) < 5000 else second
    )  # few images: drawing windows from 270 of them would change the population
    return RealData(contract, output, model, reference, pixels[start:], targets[start:])
