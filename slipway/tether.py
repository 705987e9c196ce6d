"""A process that the kernel ends when its parent dies, so that `kill -9` of the one leaves no other behind.

`python -m slipway.tether PARENT COMMAND...` becomes that command. Linux only; elsewhere nothing is tethered.
"""

import ctypes
import os
import signal
import sys

from slipway.files import is_alive

_PR_SET_PDEATHSIG = 1  # prctl(2); it survives execve


def tether_to(parent: int) -> None:
    """SIGTERM for this process as soon as its parent dies, and at once if `parent` is already dead."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not is_alive(parent):
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    tether_to(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
