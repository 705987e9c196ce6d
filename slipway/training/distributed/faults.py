"""What ends a training from outside its code, said so that a user can act: memory, loader processes, another rank that is gone.

torch reports these as RuntimeErrors that only their text tells apart; a text it does not know keeps its traceback.
"""

import ctypes
import os
import re
import signal
from collections.abc import Callable

import torch
from torch import distributed

from slipway.system.errors import SlipwayError, TrainingError

_LOST = re.compile(
    r"Connection (closed|reset|refused) by peer|Connection was likely closed|Broken pipe|remote process exited|gloo.*(Read|Write) error"
)
_NO_SHARED_MEMORY = re.compile(r"shared memory|unable to (write to|resize|mmap|map) .*torch_")
_KILLED_LOADER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\) (?:is killed by signal: ([^.]+)|exited unexpectedly)"
)
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator|can't allocate memory|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
_IN_LOADER = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)\.")
_LESS_MEMORY = "Lower train.max_batch_per_device (the gradient is then accumulated over smaller batches, which is the same step)"
_BUS_ERROR = (
    "a file that is mapped into memory was cut off while it was read (data/packed), or its disk failed, or /dev/shm is full. "
    "Run `dvc repro --force precompute`, or free space there"
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether another process of the training is gone, so that the cause is there and not here."""
    return isinstance(error, distributed.DistError | RuntimeError | ConnectionError) and bool(
        _LOST.search(str(error))
    )


def explained(error: Exception, who: str) -> Exception:
    """The error itself, or a TrainingError of one line where it is one of those above; `who` is "rank 1", say."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _NO_MEMORY.search(text):
        return TrainingError(
            f"{who} ran out of memory: {_first_line(text) or 'MemoryError'} {_LESS_MEMORY}, or use a smaller network."
        )
    if found := _KILLED_LOADER.search(text):
        return TrainingError(_about_killed_loader(who, found[1], found[2]))
    if found := _IN_LOADER.search(text):
        last = text.strip().splitlines()[-1]
        expected = isinstance(error, SlipwayError | OSError)
        return (
            TrainingError(f"{who}, loader process {found[2]}: {last.partition(': ')[2]}")
            if expected
            else error
        )
    if isinstance(error, RuntimeError) and _NO_SHARED_MEMORY.search(text):
        return TrainingError(
            f"{who} found no shared memory for its loader processes: {_first_line(text)} Enlarge /dev/shm (docker run --shm-size, or "
            "an emptyDir of medium Memory), or set train.num_workers 0."
        )
    if is_lost_peer(error):
        return TrainingError(
            f"{who} lost another process of the training, which said nothing: {_first_line(text)} Look at its node's log."
        )
    return error


def explain_bus_errors(tell: Callable[[bytes], object] = lambda text: os.write(2, text)) -> None:
    """From now on a bus error in this process is a message and exit code 1; Python's own handlers never run for one.

    A mapped file that is shorter than its map raises it, at the instruction that reads. Loader processes have torch's handler.
    """

    def leave(_: int) -> None:
        tell(f"\nerror: {_BUS_ERROR}.\n".encode())
        os._exit(1)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(leave)
    _kept_alive.append(handler)
    ctypes.CDLL(None).signal(signal.SIGBUS, handler)


_kept_alive: list[object] = []


def _about_killed_loader(who: str, process: str, by: str | None) -> str:
    if by == "Bus error":
        return f"a loader process of {who} ({process}) ended by a bus error: {_BUS_ERROR}."
    how = f"was ended by a signal ({by})" if by else "ended without a word"
    return (
        f"a loader process of {who} ({process}) {how}. Unless somebody did it, the system had no memory left: "
        "lower train.num_workers or train.max_batch_per_device, or raise the memory limit of the job."
    )


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if not line or line.endswith(".") else f"{line}."
