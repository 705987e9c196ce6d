"""Returns the verdict on an image file, checked to be equal in clean, precompute and service."""

from slipway.data.images.inspection import Inspector
from slipway.inputs.images import (
    ImageContract,
    array_from_bytes,
    decode_image,
    decode_with_pillow,
    flatten,
    image_array,
)
from slipway.serving.http.responses import Refusal
from slipway.serving.requests.decoding import ImageDecoder
from slipway.system.errors import ImageError
from tests.data.pictures import CLEAN, CONTRACT, encode, sample

READ = "read"
UNREADABLE = {"empty", "undecodable", "truncated", "pixel_bomb"}
MAX_PIXELS = 100_000
_INSPECTOR = Inspector(CLEAN.model_copy(update={"max_pixels": MAX_PIXELS}), None)
_CONTRACTS = [
    CONTRACT.model_copy(update={"channels": channels, "resize_mode": fit, "max_pixels": MAX_PIXELS})
    for channels, fit in ((1, "stretch"), (3, "crop"), (3, "pad"))
]
_DECODER = ImageDecoder(_CONTRACTS[1])


def verdict(name: str, payload: bytes) -> str:
    """Return `read`, or the rule that refuses the file.

    Any error but a refusal passes through.
    """
    in_clean, digest = _in_clean(name, payload)
    found = {"clean": in_clean, "service": _in_service(payload)}
    for contract in _CONTRACTS:
        found[f"precompute {contract.channels} {contract.resize_mode}"] = _in_precompute(
            payload, contract
        )
    assert len(set(found.values())) == 1, f"{name}: {found}"
    if in_clean == READ:
        _check_pixels(name, payload, digest)
    return in_clean


def _in_clean(name: str, payload: bytes) -> tuple[str, bytes | None]:
    facts = _INSPECTOR([sample(name, payload)]).to_pylist()[0]
    return facts["rule"] if facts["rule"] in UNREADABLE else READ, facts["pixels"]


def _in_precompute(payload: bytes, contract: ImageContract) -> str:
    try:
        array_from_bytes(payload, contract)
    except ImageError as error:
        return error.rule
    return READ


def _in_service(payload: bytes) -> str:
    reader = _DECODER.reader([payload]) or (lambda: _DECODER._pixels(payload, "image"))
    try:
        reader()
    except Refusal as refusal:
        return refusal.code
    return READ


def _check_pixels(name: str, payload: bytes, digest: bytes | None) -> None:
    """Check that the fast decoders equal Pillow, and that a lossless copy has the same digest."""
    image, by_pillow = (
        decode_image(payload, MAX_PIXELS),
        decode_with_pillow(payload, MAX_PIXELS).image,
    )
    for channels in (1, 3):
        assert flatten(by_pillow, channels).tobytes() == flatten(image, channels).tobytes(), name
        size = (
            {"size_px": image.width, "channels": channels}
            if image.width == image.height
            else {"channels": channels}
        )
        contract = _CONTRACTS[0].model_copy(update=size)
        assert (
            image_array(by_pillow, contract).tobytes()
            == array_from_bytes(payload, contract).tobytes()
        ), name
    copied = image.convert("I;16") if image.mode == "I" else image
    assert digest == _in_clean("copy.png", encode(copied))[1], f"{name}: {image.mode}"
