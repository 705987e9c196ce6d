"""Builds the sections of `reports/data.html` on images: samples of each class, and brightness."""

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.reports.console import number
from slipway.reports.evaluation.slices import brightness
from slipway.reports.pages.charts import step_chart
from slipway.reports.pages.html_page import Html, image, paragraph, section, table

_SIDE_PX = 64  # of a thumbnail: 144 take at most 2.5 MB
_MOST_CLASSES, _OF_CLASS = 24, 6
_NUM_RANGES = 8  # of a numeric target
_BRIGHTNESS_ROWS, _BINS = 1000, 32


def picture_sections(splits: Mapping[str, PackedSplit], manifest: PackedManifest) -> list[Html]:
    """Show training images of each class or range of the target, and the brightness per split."""
    train = splits["train"]
    samples = _class_samples if manifest.classes else _target_samples
    return [samples(train, manifest.classes), _brightness(splits)]


def _class_samples(train: PackedSplit, classes: Sequence[str]) -> Html:
    counts = np.array([len(train.rows_of(label)) for label in range(len(classes))])
    order = np.argsort(-counts, kind="stable")[:_MOST_CLASSES]
    rows = [[classes[k], f"{counts[k]:,}"] for k in order]
    strips = [_strip(train, train.rows_of(int(k))[:_OF_CLASS].tolist()) for k in order]
    more = len(classes) - len(order)
    note = f"And {more:,} smaller classes." if more else "Training images as they are packed."
    shown = table(["class", "training rows"], rows, numeric=["training rows"], last=strips)
    return section("Samples of each class", shown, paragraph(note, "note"))


def _target_samples(train: PackedSplit, classes: Sequence[str]) -> Html:
    order = np.argsort(train.targets, kind="stable")
    rows, strips = [], []
    for part in np.array_split(order, min(_NUM_RANGES, len(order))):
        low, high = train.targets[part[0]], train.targets[part[-1]]
        rows.append([f"{number(low)} to {number(high)}", f"{len(part):,}"])
        strips.append(_strip(train, np.sort(part)[:_OF_CLASS].tolist()))
    shown = table(["target", "training rows"], rows, numeric=["training rows"], last=strips)
    note = paragraph("Training images as they are packed, by rising target.", "note")
    return section("Samples by target", shown, note)


def _strip(train: PackedSplit, rows: Sequence[int]) -> Html:
    pictures = "".join(_thumbnail(train, row) for row in rows)
    return Html(f'<span class="strip">{pictures}</span>')


def _thumbnail(train: PackedSplit, row: int) -> Html:
    pixels = np.asarray(train.inputs[row])
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    picture.thumbnail((_SIDE_PX, _SIDE_PX))
    return image(np.asarray(picture), train.sources[row])


def _brightness(splits: Mapping[str, PackedSplit]) -> Html:
    found = {name: brightness(split.inputs, _BRIGHTNESS_ROWS) for name, split in splits.items()}
    counts = {
        name: np.histogram(values, _BINS, (0, 256))[0].tolist() for name, values in found.items()
    }
    note = (
        f"Mean of the pixels, 0 to 255, of up to {_BRIGHTNESS_ROWS:,} images of each split. "
        "reports/clean.html has the sizes of the files."
    )
    return section(
        "Brightness", step_chart(counts, 0, 256, "mean brightness"), paragraph(note, "note")
    )
