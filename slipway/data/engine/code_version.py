"""Digest of the code that determines decoded pixels: our modules and the library versions."""

from functools import cache
from importlib.metadata import version
from pathlib import Path

from slipway.inputs import images, user_function
from slipway.kinds.code_digest import digests
from slipway.system import files

_LIBRARIES = ("numpy", "pillow", "simplejpeg")


@cache
def pixel_code() -> str:
    """Return a hex digest; runs and machines with equal digests produce equal pixels."""
    root = Path(__file__).parents[3]
    start = [Path(str(module.__file__)).relative_to(root) for module in (images, user_function)]
    return files.digest_json(digests(root, start) | {name: version(name) for name in _LIBRARIES})
