"""Helpers for tests of image sources."""

from pathlib import Path
from typing import Any

from slipway.data.sources.samples import RawSample
from slipway.data.sources.sources import read_samples
from tests.data.pictures import data_params


def read(path: Path, **changes: Any) -> list[RawSample]:
    return list(read_samples(data_params(path, **changes)))
