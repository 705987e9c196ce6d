"""Ends a process when its parent dies, so that `kill -9` of the parent leaves no orphan.

`python -m slipway.system.parent_death PARENT COMMAND...` becomes that command. Linux only; has no
effect elsewhere.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2); it survives execve


def end_with(parent: int) -> None:
    """Send this process SIGTERM once `parent` dies, or at once if it is already dead."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if _is_dead(parent):
        os.kill(os.getpid(), signal.SIGTERM)


def _is_dead(process: int) -> bool:
    """Return True if the process is gone or a zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in ("Z", "X")


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
