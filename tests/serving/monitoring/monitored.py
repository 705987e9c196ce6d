"""A tiny bundle with a drift reference, and pictures that resemble its rows or differ."""

import io
import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from slipway.artifacts import bundle as bundles
from slipway.artifacts.bundle import DRIFT, LoadedBundle
from slipway.system.files import sha256_bytes
from slipway.traffic.monitoring_records import DATABASE
from tests.drift.populations import ReferenceRows, build_reference, reference_bytes
from tests.serving.bundles import CONTRACT, certify, probabilities, write_bundle

NUM_REFERENCE = 4000


def pixels(seed: int, num_rows: int, shift: int = 0) -> NDArray[np.uint8]:
    """Return random pictures (num_rows, 8, 8, 3); `shift` makes all of them brighter."""
    random = np.random.default_rng(seed)
    base = random.integers(40, 160, (num_rows, 1, 1, 1))
    noise = random.integers(-30, 31, (num_rows, *CONTRACT.shape))
    drawn: NDArray[np.uint8] = np.clip(base + noise + shift, 0, 255).astype(np.uint8)
    return drawn


def pictures(seed: int, num_rows: int, shift: int = 0) -> list[bytes]:
    """Return the pictures of `pixels` as PNG files."""
    encoded = []
    for image in pixels(seed, num_rows, shift):
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "PNG")
        encoded.append(stream.getvalue())
    return encoded


def monitored_bundle(folder: Path) -> LoadedBundle:
    """Write `folder`/bundle with a drift reference of `pixels`, and its certificate."""
    bundle = write_bundle(folder / "bundle")
    return _with_payload(folder, bundle, _payload_of_pixels(bundle.manifest.model_dump_json()))


@cache
def _payload_of_pixels(manifest: str) -> bytes:
    """Return the drift reference of `pixels` for a manifest; most tests have the same one."""
    rows = pixels(1, NUM_REFERENCE)
    outputs = probabilities(rows)
    drawn = np.random.default_rng(2).random((NUM_REFERENCE, 1))
    # Right as often as the confidence claims.
    targets = (outputs.cumsum(axis=1) < drawn).sum(axis=1).astype(np.float64)
    scores = (rows.reshape(NUM_REFERENCE, -1).mean(axis=1) / 255).astype(np.float32)
    drawn_rows = ReferenceRows(rows, outputs, scores, targets)
    return _payload(bundles.Bundle.model_validate_json(manifest), drawn_rows)


def with_reference(folder: Path, bundle: LoadedBundle, rows: ReferenceRows) -> LoadedBundle:
    """Give `folder`/bundle a drift reference of these rows, and certify it."""
    return _with_payload(folder, bundle, _payload(bundle.manifest, rows))


def _payload(manifest: bundles.Bundle, rows: ReferenceRows) -> bytes:
    return reference_bytes(
        build_reference(manifest.input, manifest.output, manifest.calibration, rows)
    )


def _with_payload(folder: Path, bundle: LoadedBundle, payload: bytes) -> LoadedBundle:
    (bundle.root / DRIFT).write_bytes(payload)
    manifest = bundle.manifest.model_copy(update={"drift_sha256": sha256_bytes(payload)})
    bundles.write_manifest(bundle.root, manifest)
    bundle = bundles.load_bundle(bundle.root)
    certify(folder / "certificate.json", bundle)
    return bundle


def num_predictions(state: Path) -> int:
    """Return the number of predictions in the database of a service."""
    path = state / DATABASE
    if not path.exists():
        return 0
    with closing(sqlite3.connect(path)) as connection:
        try:
            return int(connection.execute("SELECT count(*) FROM predictions").fetchone()[0])
        except sqlite3.OperationalError:  # it is being created
            return 0
