"""Explains failures with a cause outside the code: memory, loader processes, lost ranks.

torch raises a RuntimeError for all of them, so this module recognises them by their message. An
error with an unknown message keeps its traceback.
"""

import ctypes
import os
import re
import signal
from collections.abc import Callable

import torch
from torch import distributed

from slipway.system.errors import SlipwayError, TrainingError

_LOST_RANK = re.compile(
    r"Connection (closed|reset|refused) by peer|Connection was likely closed|Broken pipe"
    r"|remote process exited|gloo.*(Read|Write) error"
)
_TIMED_OUT = re.compile(r"Timed out waiting (\d+)ms for (send|recv)")
_NO_SHARED_MEMORY = re.compile(r"shared memory|unable to (write to|resize|mmap|map) .*torch_")
_KILLED_LOADER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\) "
    r"(?:is killed by signal: ([^.]+)|exited unexpectedly)"
)
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator|can't allocate memory|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED"
)
_IN_LOADER = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)\.")
_BUS_ERROR = (
    "a file that is mapped into memory was truncated while it was read (data/packed), or its disk "
    "failed, or /dev/shm is full. Run `dvc repro --force precompute`, or free space there"
)
_keep_alive: list[object] = []  # C holds only a pointer to the handler


def is_lost_rank(error: BaseException) -> bool:
    """Return True for a lost connection to another rank, whose own error is then the cause."""
    is_network = isinstance(error, distributed.DistError | RuntimeError | ConnectionError)
    return is_network and bool(_LOST_RANK.search(str(error)))


def explain(error: Exception, who: str) -> Exception:
    """Return a TrainingError of one line for a known fault, or else the unchanged `error`.

    `who` is the name of this process in the message, such as "rank 1".
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or _NO_MEMORY.search(text):
        return TrainingError(
            f"{who} ran out of memory: {_first_line(text) or 'MemoryError'} "
            "Lower train.max_batch_per_device (the gradient is then accumulated over smaller "
            "batches, which is the same step), or use a smaller network."
        )
    if found := _KILLED_LOADER.search(text):
        return TrainingError(_explain_killed_loader(who, found[1], found[2]))
    if found := _IN_LOADER.search(text):
        if not isinstance(error, SlipwayError | OSError):
            return error
        last_line = text.strip().splitlines()[-1]
        return TrainingError(f"{who}, loader process {found[2]}: {last_line.partition(': ')[2]}")
    if isinstance(error, RuntimeError) and _NO_SHARED_MEMORY.search(text):
        return TrainingError(
            f"{who} found no shared memory for its loader processes: {_first_line(text)} "
            "Enlarge /dev/shm (docker run --shm-size, or an emptyDir of medium Memory), or set "
            "train.num_workers 0."
        )
    if found := _TIMED_OUT.search(text):
        return TrainingError(
            f"{who} waited {int(found[1]) / 60_000:.0f} minutes for another rank, which neither "
            "answered nor ended. The line `stalled` above names it. Run the same command again to "
            "resume from the newest checkpoint."
        )
    if is_lost_rank(error):
        return TrainingError(
            f"{who} lost the connection to another rank, which reported no error: "
            f"{_first_line(text)} Look at the log of its node."
        )
    return error


def report_bus_errors(write: Callable[[bytes], object] = lambda text: os.write(2, text)) -> None:
    """Turn a bus error of this process into a message and exit code 1.

    Reading a mapped file beyond its truncated end raises SIGBUS at the reading instruction, which
    Python's own signal handlers never see. Loader processes have torch's handler.
    """

    def exit_with_message(_: int) -> None:
        write(f"\nerror: {_BUS_ERROR}.\n".encode())
        os._exit(1)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(exit_with_message)
    _keep_alive.append(handler)
    ctypes.CDLL(None).signal(signal.SIGBUS, handler)


def _explain_killed_loader(who: str, process: str, signal_name: str | None) -> str:
    if signal_name == "Bus error":
        return f"a loader process of {who} ({process}) ended by a bus error: {_BUS_ERROR}."
    how = f"was killed by a signal ({signal_name})" if signal_name else "ended without a message"
    return (
        f"a loader process of {who} ({process}) {how}. Unless somebody killed it, the system ran "
        "out of memory: lower train.num_workers or train.max_batch_per_device, or raise the "
        "memory limit of the job."
    )


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if not line or line.endswith(".") else f"{line}."
