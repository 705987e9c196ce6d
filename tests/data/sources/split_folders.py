"""Folders and tables with a given split."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from slipway.data.sources.samples import RawSample
from slipway.data.sources.sources import find_layout, read_samples, with_given_split
from slipway.data.sources.text_format import TextFormat
from slipway.system.errors import DataError
from tests.data.pictures import data_params, picture


def write_splits(root: Path, splits: Mapping[str, str]) -> Path:
    """Write two images into each class folder; a letter is a class, "" the split folder itself."""
    seed = 0
    for split, classes in splits.items():
        for label in classes or [""]:
            (root / split / label).mkdir(parents=True)
            for index in range(2):
                (root / split / label / f"{index}.png").write_bytes(picture(seed := seed + 1))
    return root


def read(root: Path, **changes: Any) -> list[RawSample]:
    """Return the samples as `clean` reads them."""
    data = data_params(root, **changes)
    return list(read_samples(with_given_split(data)[0]))


def refusal(root: Path, **changes: Any) -> str:
    with pytest.raises(DataError) as raised:
        read(root, **changes)
    return str(raised.value)


def described(root: Path, **changes: Any) -> str:
    data = data_params(root, **changes)
    samples = read(root, **changes)
    columns = {"given_split": [sample.given_split for sample in samples]}
    rows = pa.table(columns | {"time": [sample.time for sample in samples]})
    return find_layout(data).described(rows, TextFormat.of(data))
