"""Contact sheet: a picture that shows the augmentation of a few training images.

The first lines show one operation each, from one end of its range to the other. The lines below
them show all operations together, mixing included, as training draws them in its first epochs.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from slipway.data.augmentation.draws import Draw, MixDraw, draw, draw_mixing, unchanged
from slipway.data.augmentation.plan import AugmentPlan, operations, text_operations
from slipway.data.store.packed import PackedManifest, PackedSplit
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract
from slipway.training.augmentation.host import Pixels, StoredRows, changed_images, mixed_images

_NUM_IMAGES = 8
_NUM_TOGETHER = 4
_CELL_PX, _GAP_PX, _CAPTION_PX, _MARGIN_PX, _LABEL_PX, TITLE_PX = 104, 6, 17, 16, 176, 30
_LINE_PX = _CELL_PX + _CAPTION_PX + _GAP_PX
_INK, _PALE, _PAPER = (25, 28, 33), (110, 116, 125), (255, 255, 255)
_STEPS = np.linspace(0, 1, _NUM_IMAGES - 1)
_SIGNED = np.array([-1, -2 / 3, -1 / 3, 1 / 3, 2 / 3, 1])


class _Cell(NamedTuple):
    image: Pixels
    caption: str


class _Line(NamedTuple):
    label: str
    range: str
    cells: list[_Cell]


class _Samples(NamedTuple):
    """The stored images that the contact sheet shows, and the size of augmented images."""

    stored: StoredRows
    names: list[str]
    size_px: int

    def changed(self, index: int, change: Draw) -> Pixels:
        """Return image `index` with the augmentation `change` applied, (size_px, size_px, C)."""
        image: Pixels = changed_images(self.stored, np.array([index]), change, self.size_px)[0]
        return image

    def original(self, index: int) -> _Cell:
        return _Cell(self.changed(index, unchanged(1)), self.names[index])


def contact_sheet(train: PackedSplit, plan: AugmentPlan, manifest: PackedManifest) -> bytes:
    """Return a PNG that shows the augmentation of up to 8 training images.

    The images are spread over the targets. For a table or texts, the picture is a line of text.
    """
    if not isinstance(manifest.input, ImageContract):
        names = text_operations(plan)
        text = "Only images are augmented: the section augment of params.yaml has no effect here."
        if isinstance(manifest.input, TextContract):
            text = f"Operations on texts: {', '.join(names) or 'none'}."
        return _png(_text_picture(text))
    chosen = _spread(train.target_keys)
    samples = _Samples(
        StoredRows([train.inputs[chosen]]),
        [_name(train.targets[row], manifest) for row in chosen],
        manifest.input.size_px,
    )
    requested = [
        name
        for name in operations(plan)
        if manifest.input.channels == 3 or name not in ("saturation", "hue")
    ]
    single = [_operation_line(samples, plan, name, number) for number, name in enumerate(requested)]
    together = [
        _combined_line(samples, plan, train.keys[chosen], index)
        for index in range(min(_NUM_TOGETHER, len(chosen)))
    ]
    originals = _Line(
        "training images",
        f"{len(train):,} rows",
        [samples.original(index) for index in range(len(chosen))],
    )
    return _png(
        _sheet(
            [
                ("As the network would get them", [originals]),
                ("Each operation alone, from one end of its range to the other", single),
                ("All together, as training draws them", together),
            ]
        )
    )


def _spread(targets: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return rows at even distances in the order of their targets."""
    ranked = np.argsort(targets, kind="stable")
    count = min(_NUM_IMAGES, len(ranked))
    return ranked[((np.arange(count) + 0.5) * len(ranked) / count).astype(np.int64)]


def _name(target: Any, manifest: PackedManifest) -> str:
    if np.ndim(target):
        named = [name for name, given in zip(manifest.classes, target, strict=True) if given]
        return ", ".join(named) or "no label"
    return manifest.classes[int(target)] if manifest.classes else f"{target:g}"


def _operation_line(samples: _Samples, plan: AugmentPlan, name: str, number: int) -> _Line:
    """Draw the line of the sheet that shows one operation; each line uses a different image."""
    index = number % len(samples.names)
    value = getattr(plan, name)
    values = value if isinstance(value, tuple) else (value,)
    asked = _RANGES[name].format(*values)
    if name in ("mixup_alpha", "cutmix_alpha"):
        cells = _mixed_cells(samples, index, cut=name == "cutmix_alpha")
    elif name.endswith("_flip"):
        return _Line(name, asked, _flip_cells(samples, name))
    else:
        steps = _OPERATIONS[name](plan)
        cells = [
            _Cell(samples.changed(index, unchanged(1)._replace(**change)), caption)
            for caption, change in steps
        ]
    return _Line(name, asked, [samples.original(index), *cells])


_RANGES = {
    "random_resized_crop": "{:.0%} to {:.0%} of the area",
    "horizontal_flip": "in {:.0%} of the images",
    "vertical_flip": "in {:.0%} of the images",
    "scale": "{:g} to {:g} times as large",
    "rotation_deg": "up to {:g}° either way",
    "translation": "up to {:.0%} of the side",
    "crop_padding_px": "up to {:d} px either way",
    "brightness": "up to {:.0%} less or more",
    "contrast": "up to {:.0%} less or more",
    "saturation": "up to {:.0%} less or more",
    "hue": "up to {:g} turns either way",
    "erasing": "in {:.0%} of the images",
    "mixup_alpha": "fraction from Beta({0:g}, {0:g})",
    "cutmix_alpha": "area from Beta({0:g}, {0:g})",
}
_Steps = list[tuple[str, dict[str, NDArray[Any]]]]


def _factors(name: str) -> Callable[[AugmentPlan], _Steps]:
    return lambda plan: [
        (
            f"x {1 + step * getattr(plan, name):.2f}",
            {name: np.array([1 + step * getattr(plan, name)])},
        )
        for step in _SIGNED
    ]


def _crops(plan: AugmentPlan) -> _Steps:
    areas = (
        plan.random_resized_crop[1]
        + (plan.random_resized_crop[0] - plan.random_resized_crop[1]) * _STEPS
    )
    corners = ((0.5, 0.5), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 0.0), (0.5, 1.0))
    steps = []
    for area, (x, y), aspect in zip(areas, corners, plan.crop_aspect * _NUM_IMAGES, strict=False):
        fitting = float(np.clip(aspect, area, 1 / area))
        width, height = (area * fitting) ** 0.5, (area / fitting) ** 0.5
        steps.append(
            (
                f"{area:.0%}, {fitting:.2f} : 1",
                {"crop": np.array([[x * (1 - width), y * (1 - height), width, height]])},
            )
        )
    return steps


def _erasures(plan: AugmentPlan) -> _Steps:
    sides = np.sqrt(np.linspace(*plan.erasing_area, len(_STEPS)))
    return [
        (
            f"{side**2:.0%} covered",
            {"erased": np.array([[(1 - side) / 2, (1 - side) / 2, side, side]])},
        )
        for side in sides
    ]


_OPERATIONS: dict[str, Callable[[AugmentPlan], _Steps]] = {
    "random_resized_crop": _crops,
    "rotation_deg": lambda plan: [
        (
            f"{step * plan.rotation_deg:+.1f}°",
            {"rotation_deg": np.array([step * plan.rotation_deg])},
        )
        for step in _SIGNED
    ],
    "scale": lambda plan: [
        (f"x {factor:.2f}", {"scale": np.array([factor])})
        for factor in np.linspace(*plan.scale, len(_STEPS))
    ],
    "translation": lambda plan: [
        (f"{step * plan.translation:+.0%}", {"shift": np.full((1, 2), step * plan.translation)})
        for step in _SIGNED
    ],
    "crop_padding_px": lambda plan: [
        (f"{shift:+d} px", {"shift_px": np.array([[shift, shift]])})
        for shift in sorted({round(step * plan.crop_padding_px) for step in _SIGNED} - {0})
    ],
    "brightness": _factors("brightness"),
    "contrast": _factors("contrast"),
    "saturation": _factors("saturation"),
    "hue": lambda plan: [
        (f"{step * plan.hue:+.3f} turns", {"hue": np.array([step * plan.hue])}) for step in _SIGNED
    ],
    "erasing": _erasures,
}


def _flip_cells(samples: _Samples, name: str) -> list[_Cell]:
    cells = []
    for index in range(min(_NUM_IMAGES // 2, len(samples.names))):
        mirrored = samples.changed(index, unchanged(1)._replace(**{name: np.array([True])}))
        cells += [samples.original(index), _Cell(mirrored, "mirrored")]
    return cells


def _mixed_cells(samples: _Samples, index: int, *, cut: bool) -> list[_Cell]:
    partner = (index + len(samples.names) // 2) % len(samples.names)
    both = np.stack([samples.changed(which, unchanged(1)) for which in (index, partner)])
    cells = []
    for own in 0.9 - 0.8 * _STEPS:
        side = round(samples.size_px * (1 - own) ** 0.5)
        box = [0, 0, side, side] if cut else [0, 0, 0, 0]
        image = mixed_images(
            both, np.array([1]), MixDraw(np.array([own], np.float32), np.array([box]))
        )[0]
        cells.append(_Cell(image, f"+ {1 - own:.0%} {samples.names[partner]}"))
    return cells


def _combined_line(
    samples: _Samples, plan: AugmentPlan, keys: NDArray[np.uint64], index: int
) -> _Line:
    """Draw an image unchanged, then as training augments it in each of the first epochs.

    The image is mixed with another image of the sheet; training mixes within a batch.
    """
    cells = [samples.original(index)]
    everyone = np.arange(len(keys))
    for epoch in range(_NUM_IMAGES - 1):
        images = changed_images(samples.stored, everyone, draw(plan, epoch, keys), samples.size_px)
        mixing = draw_mixing(plan, epoch, keys, samples.size_px)
        partners = np.roll(everyone, -(1 + epoch))
        fraction = float(mixing.own_fraction[index])
        mixed = f"epoch {epoch}"
        if fraction < 1:
            mixed = f"+ {1 - fraction:.0%} {samples.names[partners[index]]}"
        cells.append(_Cell(mixed_images(images, partners, mixing)[index], mixed))
    return _Line("all together", samples.names[index], cells)


def _sheet(sections: Sequence[tuple[str, Sequence[_Line]]]) -> Image.Image:
    shown = [(title, lines) for title, lines in sections if lines]
    height = 2 * _MARGIN_PX + sum(TITLE_PX + len(lines) * _LINE_PX for _, lines in shown)
    sheet = Image.new(
        "RGB", (2 * _MARGIN_PX + _LABEL_PX + _NUM_IMAGES * (_CELL_PX + _GAP_PX), height), _PAPER
    )
    pen, top = ImageDraw.Draw(sheet), _MARGIN_PX
    for title, lines in shown:
        pen.text((_MARGIN_PX, top), title, _INK, ImageFont.load_default(17))
        top += TITLE_PX
        for line in lines:
            _paint(sheet, pen, line, top)
            top += _LINE_PX
    return sheet


def _paint(sheet: Image.Image, pen: ImageDraw.ImageDraw, line: _Line, top: int) -> None:
    middle = top + _CELL_PX // 2
    _write(pen, (_MARGIN_PX, middle - 18), line.label, 14, _LABEL_PX, _INK)
    _write(pen, (_MARGIN_PX, middle + 2), line.range, 12, _LABEL_PX)
    for number, cell in enumerate(line.cells):
        left = _MARGIN_PX + _LABEL_PX + number * (_CELL_PX + _GAP_PX)
        sheet.paste(_shown(cell.image), (left, top))
        _write(pen, (left, top + _CELL_PX + 1), cell.caption, 11, _CELL_PX)


def _shown(image: Pixels) -> Image.Image:
    """Resize an image to a cell of the sheet; small images are enlarged without smoothing."""
    method = cv2.INTER_AREA if len(image) > _CELL_PX else cv2.INTER_NEAREST
    resized = cv2.resize(image, (_CELL_PX, _CELL_PX), interpolation=method).reshape(
        _CELL_PX, _CELL_PX, -1
    )
    return Image.fromarray(np.broadcast_to(resized, (_CELL_PX, _CELL_PX, 3)).copy())


def _write(
    pen: ImageDraw.ImageDraw,
    place: tuple[int, int],
    text: str,
    font_px: int,
    width_px: int,
    colour: tuple[int, int, int] = _PALE,
) -> None:
    """Write text on the sheet; text wider than `width_px` is shortened."""
    font = ImageFont.load_default(font_px)
    if font.getlength(text) > width_px:
        while text and font.getlength(text + "..") > width_px:
            text = text[:-1]
        text += ".."
    pen.text(place, text, colour, font)


def _text_picture(text: str) -> Image.Image:
    picture = Image.new("RGB", (2 * _MARGIN_PX + 640, 2 * _MARGIN_PX + 20), _PAPER)
    ImageDraw.Draw(picture).text((_MARGIN_PX, _MARGIN_PX), text, _INK, ImageFont.load_default(14))
    return picture


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
