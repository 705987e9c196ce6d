"""Builds a network whose weights lie in a memory-mapped file, for networks larger than memory.

The code that draws or loads weights runs unchanged, so the weights are bit for bit those of a
network in memory. The file is unnamed, so a killed process leaves nothing behind. Strategies copy
their parts of the weights out of the file and drop the rest.
"""

import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipway.system.errors import UnavailableError

_RESIDENT_BYTES = 64 * 2**20  # mapped weights kept in memory, besides those that an operation uses
_PAGE = mmap.ALLOCATIONGRANULARITY


class MappedWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves each parameter that is created within the block to an unnamed file in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        with tempfile.TemporaryFile(dir=folder) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        # The address range has the size of the free disk; a page takes disk once it is written.
        size = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize // _PAGE * _PAGE
        if not size:
            raise UnavailableError(self._no_space(0))
        os.ftruncate(self._file, size)
        self._pages = mmap.mmap(self._file, size)
        self._begin = torch.frombuffer(self._pages, dtype=torch.uint8, count=1).data_ptr()
        self._used, self._touched = 0, 0

    def __enter__(self) -> "MappedWeights":
        self._hook = register_module_parameter_registration_hook(self._move)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._hook.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.release()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            if type(leaf) in (Tensor, nn.Parameter) and self._is_mapped(leaf):
                self._touched += leaf.nbytes
        if self._touched > _RESIDENT_BYTES:
            self.release()
        return result

    def release(self) -> None:
        """Release all pages of the file from memory; they are read again at their next use."""
        if self._used:
            self._pages.madvise(mmap.MADV_DONTNEED, 0, self._used)
        self._touched = 0

    def _is_mapped(self, tensor: Tensor) -> bool:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return False
        return self._begin <= tensor.untyped_storage().data_ptr() < self._begin + self._used

    def _move(self, _module: nn.Module, _name: str, param: nn.Parameter) -> None:
        """Copy a parameter into the file. Raises UnavailableError if the disk is full."""
        if type(param.data) is not Tensor or param.device.type != "cpu" or not param.numel():
            return
        if self._is_mapped(param):
            return  # two modules share it
        size = -(-param.nbytes // _PAGE) * _PAGE
        try:
            os.posix_fallocate(self._file, self._used, size)
        except OSError as error:
            raise UnavailableError(self._no_space(self._used + size)) from error
        mapped = torch.frombuffer(
            self._pages, dtype=param.dtype, count=param.numel(), offset=self._used
        ).view(param.shape)
        self._used += size
        param.data = mapped.copy_(param.data)

    def _no_space(self, num_bytes: int) -> str:
        return (
            f"the initial weights need {max(num_bytes, 1):,} bytes or more in {self._folder}, but "
            "its disk is full. Free space there: every process writes the whole network to a "
            "file of its own, before it keeps only its parts."
        )
