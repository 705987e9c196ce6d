"""Small pictures and params for the tests of `slipway/data/`."""

import base64
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from slipway.config.sections import CleanParams, DataParams
from slipway.data.images.cleaning import clean_samples, compare_samples, digest_pixels
from slipway.data.rules.result import Cleaned
from slipway.data.sources.checksums import ChecksumList
from slipway.data.sources.samples import RawSample
from slipway.data.splits.split_file import SplitFile
from slipway.inputs.images import FORMATS, ImageContract
from slipway.kinds.registry import Task
from slipway.system.files import sha256_bytes
from tests.project_params import PROJECT, clean_params

CLEAN = clean_params(max_bad_fraction=0.5, min_side_px=4, max_pixels=10_000)
CONTRACT = ImageContract(
    kind="images",
    transform=None,
    size_px=8,
    channels=3,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10_000,
)
IMAGE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def pixels(seed: int, size_px: int = 8, channels: int = 3) -> NDArray[np.uint8]:
    """Return noise as (size_px, size_px, channels) pixels."""
    return np.random.default_rng(seed).integers(
        0, 256, (size_px, size_px, channels), dtype=np.uint8
    )


# A HEIC of 16x24 pixels, (200, 30, 39) above and (20, 60, 220) below, which pi-heif cannot write.
HEIC = base64.b64decode(
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAXxtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAA"
    "AAAAAAAAAAAAAAACJpbG9jAAAAAERAAAEAAQAAAAABoAABAAAAAAAAAFIAAAAjaWluZgAAAAAAAQAAABVpbmZl"
    "AgAAAAABAABodmMxAAAAAA5waXRtAAAAAAABAAAA/GlwcnAAAADcaXBjbwAAAHVodmNDAQNwAAAAkAAAAAAAHv"
    "AA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQApQgEBA3AAAAMAkAAAAwAAAwAeoCCB"
    "BZbqrprm4CGgwIAAAAyAAAADAIRiAAEABkQBwXPBiQAAABNjb2xybmNseAABAA0ABoAAAAAUaXNwZQAAAAAAAA"
    "BAAAAAQAAAAChjbGFwAAAAEAAAAAEAAAAYAAAAAf///9AAAAAC////2AAAAAIAAAAQcGl4aQAAAAADCAgIAAAA"
    "GGlwbWEAAAAAAAAAAQABBYECAwWEAAAAWm1kYXQAAABOKAGvBPIa8caAQlMov8f///ngdl3AtEukQtn48uiWdV"
    "Qx51/6LS/bFW+P1xr5b8nA4aAAGvwytDp6WcluXdS0IkBnlL6fw6kgZv2abByc"
)
WRITTEN = tuple(name for name in FORMATS if name != "HEIF")  # the formats that Pillow writes


def encode(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, format=image_format, **options)
    return buffer.getvalue()


def picture(seed: int, size_px: int = 8, image_format: str = "PNG") -> bytes:
    """Return an encoded picture of noise that depends only on `seed`."""
    return encode(Image.fromarray(pixels(seed, size_px)), image_format)


def data_params(path: Path, **changes: Any) -> DataParams:
    """Return the section `data` of the project's params.yaml, with changes."""
    return DataParams.model_validate({**PROJECT.data.model_dump(), "path": str(path), **changes})


def sample(
    source: str,
    payload: bytes,
    label: str | None = None,
    target: float | None = None,
    group: str | None = None,
) -> RawSample:
    """Return a raw sample that was read without a fault."""
    return RawSample(source, payload, label, target, group, None)


Read = Callable[[Collection[str] | None], Iterable[RawSample]]


def cleaned_by(
    read: Read,
    params: CleanParams,
    task: Task,
    num_workers: int = 1,
    classes: Iterable[str] | None = None,
    digests: ChecksumList | None = None,
    split_file: SplitFile | None = None,
) -> Cleaned:
    """Clean samples as the stage does; `read` yields all samples, or those with given sources."""

    def again(wanted: Collection[str]) -> Iterator[pa.RecordBatch]:
        return digest_pixels(read(wanted), params, num_workers)

    return compare_samples(
        clean_samples(read(None), params, num_workers, classes),
        params,
        task,
        again,
        digests,
        split_file,
    )


def from_memory(samples: Iterable[RawSample]) -> Read:
    """Return a reader of these samples."""
    held = list(samples)
    return lambda wanted: [sample for sample in held if wanted is None or sample.source in wanted]


def write_parquet(
    path: Path, payloads: Sequence[bytes | None], labels: list[Any], **columns: list[Any]
) -> Path:
    """Write a table in the layout of the embedded data."""
    images = [
        None if payload is None else {"bytes": payload, "path": f"{index}.png"}
        for index, payload in enumerate(payloads)
    ]
    pq.write_table(
        pa.table({"image": pa.array(images, IMAGE_TYPE), "label": labels, **columns}), path
    )
    return path


def write_folder(root: Path, classes: dict[str, list[bytes]]) -> Path:
    """Write images with one sub-folder per class."""
    for label, payloads in classes.items():
        (root / label).mkdir(parents=True)
        for index, payload in enumerate(payloads):
            (root / label / f"{index}.png").write_bytes(payload)
    return root


def row(
    seed: int, label: str | None = "a", target: float | None = None, group: str | None = None
) -> dict[str, Any]:
    """Return a row of the schema ROWS, with the id of the content `seed`."""
    sha256 = sha256_bytes(str(seed).encode())
    facts = {
        "width": 8,
        "height": 8,
        "bytes": 100,
        "sha256": sha256,
        "flags": [],
        "corrections": [],
    }
    return {
        "id": sha256[:32],
        "source": str(seed),
        "label": label,
        "target": target,
        "group": group,
        **facts,
    }
