"""Runs a command: turns errors into messages and exit codes."""

import logging
import sys
from collections.abc import Callable

from slipway.system.command_line import quiet_when_unread
from slipway.system.disk_faults import disk_fault
from slipway.system.environment import prepare_environment
from slipway.system.errors import SlipwayError

# Not in `run_command`: some stages import torch first, and OpenMP reads its variables then.
prepare_environment()


@quiet_when_unread()
def run_command(run: Callable[[], None]) -> None:
    """Call `run`. Errors that the user can fix exit with code 1 and a message, Ctrl-C with 130."""
    # Without Triton, which only a GPU uses, torch warns at each start that it counts no FLOPs.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    try:
        run()
        print(end="", flush=True)  # a full disk raises here, too
    except SlipwayError as error:
        _end(_with_notes(str(error), error), 1)
    except KeyboardInterrupt:
        _end("interrupted.", 130)
    except Exception as error:
        fault = disk_fault(error)
        if fault is None:  # our own fault: keep the traceback
            raise
        _end(_with_notes(fault, error), 1)


def _with_notes(text: str, error: Exception) -> str:
    return " ".join([text, *getattr(error, "__notes__", [])])


def _end(text: str, exit_code: int) -> None:
    print(f"\nerror: {text}", file=sys.stderr)
    sys.exit(exit_code)
