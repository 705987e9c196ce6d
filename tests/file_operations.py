"""Kills a process at its n-th file operation by tracing its system calls. Linux on x86-64 only."""

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable

_TRACEME, _CONT_TO_SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_TRACESYSGOOD, _EXITKILL = 0x1, 0x100000
_ENTERING = 1
# Of x86-64: everything that makes, fills, syncs, renames or removes a file.
_CALLS = {
    1: "write", 2: "open", 18: "pwrite64", 20: "writev", 40: "sendfile", 74: "fsync",
    75: "fdatasync", 76: "truncate", 77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir",
    85: "creat", 87: "unlink", 257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat",
    285: "fallocate", 296: "pwritev", 316: "renameat2", 326: "copy_file_range",
}  # fmt: skip

is_possible = sys.platform == "linux" and platform.machine() == "x86_64"


class _SyscallInfo(ctypes.Structure):
    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("pointers", ctypes.c_uint64 * 2),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
    )


def killed_at(count: int, action: Callable[[], None]) -> str | None:
    """Run `action` in a fork of this process and kill it just before its `count`-th file operation.

    Returns the name of that operation, or None if `action` ended before it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    child = os.fork()
    if child == 0:
        _run_traced(libc, action)
    os.waitpid(child, 0)
    _ptrace(libc, _SETOPTIONS, child, 0, _TRACESYSGOOD | _EXITKILL)
    seen, passed_on = 0, 0
    while True:
        _ptrace(libc, _CONT_TO_SYSCALL, child, 0, passed_on)
        _, status = os.waitpid(child, 0)
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 0, "the action failed by itself"
            return None
        stopped_by = os.WSTOPSIG(status)
        passed_on = 0 if stopped_by & 0x80 else stopped_by
        if passed_on:
            continue
        info = _SyscallInfo()
        _ptrace(libc, _GET_SYSCALL_INFO, child, ctypes.sizeof(info), ctypes.addressof(info))
        if info.op == _ENTERING and info.number in _CALLS:
            seen += 1
            if seen == count:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return _CALLS[info.number]


def _run_traced(libc: ctypes.CDLL, action: Callable[[], None]) -> None:
    code = 1
    try:
        _ptrace(libc, _TRACEME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        action()
        code = 0
    finally:
        os._exit(code)


def _ptrace(libc: ctypes.CDLL, request: int, process: int, address: int, data: int) -> None:
    answer = libc.ptrace(
        ctypes.c_long(request),
        ctypes.c_long(process),
        ctypes.c_void_p(address),
        ctypes.c_void_p(data),
    )
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request}")
