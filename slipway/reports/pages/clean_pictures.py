"""Reads the pictures for `reports/clean.html` from the raw data, and reduces them."""

import contextlib

import numpy as np

from slipway.config.sections import DataParams
from slipway.data.rules.report import CleanReport
from slipway.data.sources.sources import read_samples
from slipway.inputs.images import decode_image, flatten
from slipway.reports.pages.clean_page import Pictures, shown_sources
from slipway.system.errors import ImageError

_SIDE_PX = 128


def pictures_of(report: CleanReport, data: DataParams, max_pixels: int) -> Pictures:
    """Return the decodable pictures by source, as (H, W, 3) uint8 of at most 128 px."""
    pictures = {}
    wanted = shown_sources(report)
    for sample in read_samples(data, wanted) if wanted else ():
        with contextlib.suppress(ImageError):
            image = flatten(decode_image(sample.payload, max_pixels), channels=3)
            image.thumbnail((_SIDE_PX, _SIDE_PX))
            pictures[sample.source] = np.asarray(image, dtype=np.uint8)
    return pictures
