"""Provides a path to a model's verified bytes: an anonymous file in memory.

ONNX Runtime copies and parses bytes while it holds Python's lock: 0.7 ms for each megabyte, in
which a service cannot answer. It reads a file without the lock, in two thirds of the time. But next
to a file it also looks for external weights, which no digest covers. A graph that may have such
weights is therefore passed as bytes, and ONNX Runtime refuses it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SMALL = 1 << 20  # bytes below which a file does not pay
_PIECE = 1 << 20  # bytes that are searched at once, in half a millisecond
# The key of a TensorProto's external_data that has the file's name: every reference has it.
_ELSEWHERE = b"location"


@contextmanager
def path_or_bytes(model: bytes) -> Iterator[str | bytes]:
    """Yield a path to the bytes of `model`, valid in the block; the bytes if a path is unsafe."""
    if len(model) < SMALL or not hasattr(os, "memfd_create") or may_refer_elsewhere(model):
        yield model
        return
    with ExitStack() as open_files:
        try:
            path = _written(model, open_files)
        except OSError:  # a sandbox, a sysctl (`vm.memfd_noexec`) or a limit forbids it
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
    """Return True if an ONNX graph may refer to other files, such as external weights.

    False is certain; True may be wrong.
    """
    overlap = len(_ELSEWHERE) - 1
    for begin in range(0, len(model), _PIECE):
        if model.find(_ELSEWHERE, begin, begin + _PIECE + overlap) >= 0:
            return True
        time.sleep(0)  # yields Python's lock to other threads
    return False
