"""Digest of the code that determines decoded pixels: Slipway's modules and library versions."""

from functools import cache
from importlib.metadata import version
from pathlib import Path

from slipway.inputs import images, user_function
from slipway.kinds.code_digest import digests
from slipway.system import files

_LIBRARIES = ("numpy", "pillow", "simplejpeg")


@cache
def pixel_code() -> str:
    """Return the digest as hexadecimal text; equal digests mean that equal pixels are decoded."""
    root = Path(__file__).parents[3]
    start = [Path(str(module.__file__)).relative_to(root) for module in (images, user_function)]
    return files.digest_json(digests(root, start) | {name: version(name) for name in _LIBRARIES})
