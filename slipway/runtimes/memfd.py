"""A model's bytes as a file that only this process has, in memory: the very bytes that were digested, under a path.

ONNX Runtime copies and parses bytes while it holds Python's lock, 0.7 ms for each megabyte in which a service answers nobody; a file it
reads without the lock, in two thirds of the time. But beside a file it also looks for weights that a graph keeps elsewhere, which no
digest covers: a graph that may have such is given as bytes, and refused by ONNX Runtime as ever.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SMALL = 1 << 20  # bytes: not worth it
_PIECE = 1 << 20  # bytes that are searched at once, in half a millisecond
_ELSEWHERE = b"location"  # the key under which a TensorProto's external_data has a file's name; there is no reference without it


@contextmanager
def path_or_bytes(model: bytes) -> Iterator[str | bytes]:
    """A path that leads to the bytes inside the block; where there can be none, or it must not be, the bytes."""
    if len(model) < SMALL or not hasattr(os, "memfd_create") or may_refer_elsewhere(model):
        yield model
        return
    with ExitStack() as open_files:
        try:
            path = _written(model, open_files)
        except (
            OSError
        ):  # a sandbox or a sysctl forbids it (`vm.memfd_noexec`), or a limit is reached
            open_files.close()
            path = ""
        yield path if path and Path(path).exists() else model


def _written(model: bytes, open_files: ExitStack) -> str:
    descriptor = os.memfd_create("slipway-model", os.MFD_CLOEXEC)
    file = open_files.enter_context(os.fdopen(descriptor, "wb", buffering=0))
    left = memoryview(model)
    while left:
        left = left[file.write(left) :]
    return f"/proc/self/fd/{descriptor}"


def may_refer_elsewhere(model: bytes) -> bool:
    """Whether an ONNX graph names another file: certain where it says no."""
    overlap = len(_ELSEWHERE) - 1
    for begin in range(0, len(model), _PIECE):
        if model.find(_ELSEWHERE, begin, begin + _PIECE + overlap) >= 0:
            return True
        time.sleep(0)  # lets other threads have Python's lock
    return False
