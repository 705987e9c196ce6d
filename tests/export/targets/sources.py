"""Certified models of images and tables with test rows, made without training."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from slipway.artifacts.certificate import read_certificate
from slipway.export.certification.comparison import HopComparison, TestRows
from slipway.export.certification.http_hop import RowPayload
from slipway.export.targets.exported import CertifiedRows, ExportSource
from slipway.inputs.columns import encode_rows, read_row
from slipway.inputs.images import array_from_bytes
from slipway.metrics.scores import Resampling
from tests.serving.bundles import (
    COLUMNS,
    CONTRACT,
    LABELS,
    certify,
    row_classifier,
    table_row,
    write_bundle,
)

RESAMPLING = Resampling(seed=7, num_samples=50, confidence=0.95)


def photo(seed: int, size: tuple[int, int], kind: str = "PNG", alpha: bool = False) -> bytes:
    """An encoded smooth picture with noise, as large as (width, height)."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize(size, Image.Resampling.BICUBIC)).astype(int)
    noisy = np.clip(pixels + generator.integers(-9, 10, pixels.shape), 0, 255).astype(np.uint8)
    image = Image.fromarray(noisy)
    if alpha:
        image.putalpha(Image.fromarray(generator.integers(0, 256, size[::-1], dtype=np.uint8)))
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def photos(count: int = 12) -> list[bytes]:
    """PNGs of several sizes, each third with transparency."""
    return [photo(row, (20 + row, 31 - row), alpha=row % 3 == 0) for row in range(count)]


def image_source(folder: Path, payloads: Sequence[bytes], **changes: Any) -> ExportSource:
    """A certified model of images whose test rows are `payloads`."""
    inputs = np.stack([array_from_bytes(payload, CONTRACT) for payload in payloads])
    return _source(folder, inputs, payloads, "image_classification", None, **changes)


def table_source(folder: Path, count: int = 20) -> ExportSource:
    """A certified model of a table."""
    rows = [table_row(number) for number in range(count)]
    inputs = encode_rows([read_row(row, COLUMNS) for row in rows], COLUMNS)
    payloads = [json.dumps(row).encode() for row in rows]
    return _source(folder, inputs, payloads, "table_classification", row_classifier())


def _source(
    folder: Path,
    inputs: NDArray[Any],
    payloads: Sequence[bytes],
    task: Any,
    graph: Any,
    **changes: Any,
) -> ExportSource:
    bundle = write_bundle(folder / "bundle", graph, **changes)
    certificate = read_certificate(certify(folder / "certificate.json", bundle))
    ids = [f"row{number}" for number in range(len(payloads))]
    targets = np.arange(len(ids)) % len(LABELS)
    rows = TestRows(task, LABELS, ids, ids, inputs, targets)
    found = [RowPayload(row, ids[row], content, "") for row, content in enumerate(payloads)]
    return ExportSource(
        bundle,
        certificate,
        "fp32",
        CertifiedRows(
            HopComparison(rows, RESAMPLING), lambda: iter(found), 1e-5, {"int8": 0.01}, 3
        ),
    )
