"""The contact sheet: what augmentation does to a few training images, as one picture.

A row is an image: as it is, after each operation alone at its strongest, and after the full draws of the first epochs.
"""

import io
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from slipway.data.augmentation import AugmentPlan, Draw, affine_matrices, draw
from slipway.data.packed import PackedManifest, PackedSplit
from slipway.training.augmentation import augment_batch

_NUM_ROWS = 8
_NUM_EPOCHS = 6
_CELL_INCHES = 0.95


class _Column(NamedTuple):
    title: str
    change: Draw


def contact_sheet(train: PackedSplit, plan: AugmentPlan, manifest: PackedManifest) -> bytes:
    """A PNG of up to 8 training images, spread over the classes or the range of the target."""
    chosen = _spread(train.targets)
    images, keys = np.array(train.inputs[chosen]), train.keys[chosen]
    singles = [_Column("original", _change(len(chosen))), *_single_operations(plan, len(chosen))]
    full = [_Column(f"epoch {epoch}", draw(plan, epoch, keys)) for epoch in range(_NUM_EPOCHS)]
    columns = singles + full
    figure = Figure(figsize=(_CELL_INCHES * len(columns) + 1.45, _CELL_INCHES * len(chosen) + 1.1), dpi=110)
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.subplots(len(chosen), len(columns), squeeze=False)
    for index, column in enumerate(columns):
        for axis, image in zip(axes[:, index], _apply(images, column.change), strict=True):
            _show(axis, image)
        axes[0, index].set_title(column.title, fontsize=8)
    for axis, target in zip(axes[:, 0], train.targets[chosen], strict=True):
        axis.set_ylabel(_name(target, manifest), fontsize=8, rotation=0, ha="right", va="center")
    _frame(figure, axes, len(singles))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _spread(targets: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of rows at even distances through the targets' ranks."""
    ranked = np.argsort(targets, kind="stable")
    count = min(_NUM_ROWS, len(ranked))
    return ranked[((np.arange(count) + 0.5) * len(ranked) / count).astype(np.int64)]


def _single_operations(plan: AugmentPlan, count: int) -> list[_Column]:
    columns = []
    if plan.rotation_deg:
        columns += [
            _Column(f"rotate\n{sign * plan.rotation_deg:+g}°", _change(count, rotation_deg=sign * plan.rotation_deg)) for sign in (1, -1)
        ]
    columns += [_Column(f"scale\n{factor:g}", _change(count, scale=factor)) for factor in sorted(set(plan.scale)) if factor != 1]
    shift = plan.crop_padding_px
    if shift:
        columns += [_Column(f"shift\n{sign * shift:+d} px", _change(count, shift_px=sign * shift)) for sign in (1, -1)]
    if plan.horizontal_flip:
        columns.append(_Column(f"flip ↔\np={plan.horizontal_flip:g}", _change(count, horizontal=True)))
    if plan.vertical_flip:
        columns.append(_Column(f"flip ↕\np={plan.vertical_flip:g}", _change(count, vertical=True)))
    return columns


def _change(
    count: int, *, rotation_deg: float = 0.0, scale: float = 1.0, shift_px: int = 0, horizontal: bool = False, vertical: bool = False
) -> Draw:
    return Draw(
        rotation_deg=np.full(count, rotation_deg),
        scale=np.full(count, scale),
        shift_x_px=np.full(count, shift_px),
        shift_y_px=np.full(count, shift_px),
        horizontal_flip=np.full(count, horizontal),
        vertical_flip=np.full(count, vertical),
    )


def _apply(images: NDArray[np.uint8], change: Draw) -> NDArray[np.uint8]:
    sampling = torch.from_numpy(affine_matrices(change, images.shape[1]))
    changed: NDArray[np.uint8] = augment_batch(torch.from_numpy(images), sampling).numpy()
    return changed


def _show(axis: Axes, image: NDArray[np.uint8]) -> None:
    axis.imshow(image[:, :, 0] if image.shape[2] == 1 else image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])


def _name(target: float, manifest: PackedManifest) -> str:
    return manifest.classes[int(target)] if manifest.classes else f"{target:g}"


def _frame(figure: Figure, axes: Any, num_singles: int) -> None:
    """Titles over the two halves, and a gap between them."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left=1.0 / width, right=1 - 0.3 / width, bottom=0.1 / height, top=1 - 0.85 / height, wspace=0.06, hspace=0.06)
    for axis in axes[:, num_singles:].flat:
        place = axis.get_position()
        axis.set_position([place.x0 + 0.12 / width, place.y0, place.width, place.height])
    for column, text in ((0, "each operation alone, at its strongest"), (num_singles, "all together, as drawn for training")):
        x = axes[0, column].get_position().x0
        figure.text(x, 1 - 0.3 / height, text, fontsize=10, fontweight="bold")
