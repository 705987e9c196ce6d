"""Small pictures of the samples that `reports/clean.html` shows, read again from the raw data."""

import numpy as np
from numpy.typing import NDArray

from slipway.config.sections import DataParams
from slipway.data.rules.report import CleanReport
from slipway.data.sources.sources import read_samples
from slipway.inputs.images import decode_image, flatten
from slipway.reports.pages.clean_page import Pictures, shown_sources
from slipway.system.errors import ImageError

_SIDE_PX = 128


def pictures_of(report: CleanReport, data: DataParams, max_pixels: int) -> Pictures:
    """By source, (H, W, 3) uint8 of at most 128 px; without those that cannot be decoded."""
    pictures = {}
    wanted = shown_sources(report)
    for sample in read_samples(data, wanted) if wanted else ():
        picture = _picture(sample.payload, max_pixels)
        if picture is not None:
            pictures[sample.source] = picture
    return pictures


def _picture(payload: bytes, max_pixels: int) -> NDArray[np.uint8] | None:
    try:
        image = flatten(decode_image(payload, max_pixels), channels=3)
    except ImageError:
        return None
    image.thumbnail((_SIDE_PX, _SIDE_PX))
    return np.asarray(image, dtype=np.uint8)
