"""Raw images as a client would send them."""

from collections.abc import Iterator

from slipway.config.sections import DataParams
from slipway.data.sources.samples import RawSample
from slipway.data.sources.sources import read_samples
from slipway.inputs.images import ImageContract
from slipway.system import files

_ID_DIGITS = 32  # a row's id is the beginning of its SHA-256


def raw_rows(
    data: DataParams, contract: ImageContract, wanted: set[str]
) -> Iterator[tuple[str, str | None, bytes]]:
    """Yield `raw_row` of each sample whose source is wanted."""
    return map(raw_row, read_samples(data, wanted=wanted))


def raw_row(sample: RawSample) -> tuple[str, str | None, bytes]:
    """Return source, id and bytes of a sample; the id is None if the sample cannot be read."""
    digest = None if sample.fault else files.sha256_bytes(sample.payload)[:_ID_DIGITS]
    return sample.source, digest, sample.payload
