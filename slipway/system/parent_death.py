"""A process that the kernel ends when its parent dies, so that `kill -9` of the one leaves no other behind.

`python -m slipway.system.parent_death PARENT COMMAND...` becomes that command. Linux only; elsewhere nothing is tethered.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2); it survives execve


def tether_to(parent: int) -> None:
    """SIGTERM for this process as soon as its parent dies, and at once if `parent` is already dead."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if _is_dead(parent):
        os.kill(os.getpid(), signal.SIGTERM)


def _is_dead(process: int) -> bool:
    """Gone, or a zombie that nobody has waited for yet."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in ("Z", "X")


if __name__ == "__main__":
    tether_to(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
