"""Requests for the load test: the user's own files, or else examples from the bundle.

Golden rows are images at the network's size, which are quick to decode as PNG. If callers send
camera photos, pass some: decoding then takes longer than the model.
"""

from dataclasses import dataclass
from pathlib import Path

from slipway.artifacts.bundle import LoadedBundle
from slipway.kinds.registry import input_kind
from slipway.serving.load_test.load import http_request
from slipway.serving.schemas import input_api
from slipway.system.errors import DataError

_MAX_SAMPLES = 64
_MAX_BYTES = 64 << 20  # in total


@dataclass(frozen=True)
class Samples:
    """Encoded HTTP requests for the load test, which sends them in order, again and again."""

    requests: list[bytes]
    description: str  # for the card

    def __call__(self, number: int) -> bytes:
        """Return the request number `number` of the load test, counted from 0."""
        return self.requests[number % len(self.requests)]


def samples_of(bundle: LoadedBundle, given: Path | None = None) -> Samples:
    """Read request bodies from `given`, a file or a folder; without it, use the bundle's examples.

    Raises DataError if there are none, or if they cannot be read.
    """
    contract = bundle.manifest.input
    if given is not None:
        bodies, description = _read(given), f"files of {given}"
    else:
        bodies, description = input_api(contract).example_bodies(bundle, _MAX_SAMPLES)
    content_type = input_kind(contract.kind).content_type
    return Samples(
        [http_request(body=body, content_type=content_type) for body in bodies],
        f"{len(bodies)}: {description}",
    )


def _read(given: Path) -> list[bytes]:
    paths = (
        sorted(path for path in given.iterdir() if path.is_file())[:_MAX_SAMPLES]
        if given.is_dir()
        else [given]
    )
    try:
        num_bytes = sum(path.stat().st_size for path in paths)
        if not 0 < num_bytes <= _MAX_BYTES:
            raise DataError(
                f"{given} has {num_bytes} bytes to send, expected 1 to {_MAX_BYTES}. "
                "Name a file or a folder of request bodies with --samples."
            )
        return [path.read_bytes() for path in paths]
    except OSError as error:
        raise DataError(
            f"{given} cannot be read: {error.strerror}. "
            "Name a file or a folder of request bodies with --samples."
        ) from None
