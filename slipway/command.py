"""Runs a stage as a command: params in, exit code out, errors as one readable message."""

import errno
import sys
from collections.abc import Callable

from slipway.errors import SlipwayError
from slipway.params import Params, load_params

# What the machine refuses, and what a user can do about it. Any other OSError is a fault of ours and keeps its traceback.
_FIXES = {
    errno.ENOSPC: "Free space there.",
    errno.EDQUOT: "Free space, or have the quota raised.",
    errno.EROFS: "Run in a folder that can be written.",
    errno.EACCES: "Give this user the right to it.",
    errno.EPERM: "Give this user the right to it.",
    errno.EIO: "Check the disk.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
}


def run_stage(run: Callable[[Params], None]) -> None:
    """Call `run(params)`; what the user can mend becomes a message on stderr and exit code 1, Ctrl-C exit code 130."""
    try:
        run(load_params())
    except SlipwayError as error:
        _end(" ".join([str(error), *getattr(error, "__notes__", [])]), 1)
    except KeyboardInterrupt:
        _end("interrupted.", 130)
    except OSError as error:
        if error.errno not in _FIXES:
            raise
        place = error.filename2 or error.filename or "the file system"  # of a copy the target comes second
        _end(f"{place}: {error.strerror}. {_FIXES[error.errno]}", 1)


def _end(text: str, exit_code: int) -> None:
    print(f"\nerror: {text}", file=sys.stderr)
    sys.exit(exit_code)
