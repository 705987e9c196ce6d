"""From a kept payload to what the network takes, by the bundle's own contract: what the service does with the same bytes."""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.inputs.columns import ColumnContract, encode_rows, listed_rows, read_row
from slipway.inputs.contract import InputContract
from slipway.inputs.images import ImageContract, array_from_bytes
from slipway.inputs.multipart import decode_images
from slipway.system.errors import DataError


def decode_payload(content_type: str, payload: bytes, contract: InputContract) -> NDArray[Any]:
    """(rows, ...) as the network takes them.

    DataError where this Slipway does not take the payload any more; UnavailableError or IntegrityError where
    the bundle's own function on images is not here, or is another.
    """
    if isinstance(contract, ImageContract):
        return np.stack(
            [array_from_bytes(image, contract) for image in _images(content_type, payload)]
        )
    if not isinstance(contract, ColumnContract):
        raise DataError(f"requests with {contract.kind} cannot be replayed.")
    try:
        content = json.loads(payload)
    except ValueError as error:
        raise DataError(f"it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError("it is no JSON object")
    rows = listed_rows(content)
    return encode_rows(
        [read_row(row, contract) for row in ([content] if rows is None else rows)], contract
    )


def _images(content_type: str, payload: bytes) -> list[bytes]:
    try:
        return decode_images(content_type, payload)
    except ValueError as error:
        raise DataError(str(error)) from error
