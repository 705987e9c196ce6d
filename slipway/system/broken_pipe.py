"""Commands whose output nobody reads any more end as Unix tools do."""

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_when_unread() -> Iterator[None]:
    """End the process without a word, as Unix tools do, once nobody reads its output any more (`... | head`).

    A BrokenPipeError of anything else, such as a socket, is raised on.
    """
    try:
        try:
            yield
        finally:
            print(
                end="", flush=True
            )  # what is buffered fails here, and not in the interpreter's last moments
    except BrokenPipeError:
        unread = _unread()
        if not unread:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in unread:
            os.dup2(nowhere, descriptor)  # the interpreter flushes once more when it ends
        sys.exit(128 + signal.SIGPIPE)


def _unread() -> list[int]:
    """Standard output and standard error, as far as they are pipes that nobody reads."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return [descriptor for descriptor, event in poll.poll(0) if event & select.POLLERR]
