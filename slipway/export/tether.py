"""`python -m slipway.export.tether COMMAND...`: becomes that command, which the kernel ends when its parent dies.

So a killed `verify` leaves no service running. Linux only; elsewhere the command runs without the tether.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); it survives execve

if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execvp(sys.argv[1], sys.argv[1:])
