"""What decides about the pixels besides the data and the params: our decoding code and the libraries under it."""

from functools import cache
from importlib.metadata import version
from pathlib import Path

from slipway.inputs import images as preprocess
from slipway.inputs import user_function
from slipway.system import files

_LIBRARIES = ("numpy", "pillow", "simplejpeg")


@cache
def pixel_code() -> str:
    """Hex digest: two machines, or two runs, with the same one make the same pixels."""
    sources = {module.__name__: files.sha256_file(Path(str(module.__file__))) for module in (preprocess, user_function)}
    return files.digest_json(sources | {name: version(name) for name in _LIBRARIES})
