"""Handling of closed output pipes, as Unix tools do (`... | head`)."""

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_when_unread() -> Iterator[None]:
    """End the process silently if the reader of its output closes the pipe.

    A BrokenPipeError of anything else, such as a socket, propagates.
    """
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # a write error occurs here, not at interpreter exit
    except BrokenPipeError:
        poll = select.poll()
        for descriptor in (1, 2):
            poll.register(descriptor, 0)
        unread = [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]
        if not unread:
            raise
        devnull = os.open(os.devnull, os.O_WRONLY)
        for descriptor in unread:
            os.dup2(devnull, descriptor)  # the interpreter flushes once more when it exits
        sys.exit(128 + signal.SIGPIPE)
