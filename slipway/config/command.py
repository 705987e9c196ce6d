"""Runs a stage as a command: params in, exit code out, errors as one readable message."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slipway.system.disk_faults import disk_fault, try_to_write
from slipway.system.errors import SlipwayError

if TYPE_CHECKING:
    from slipway.config.params import Params

_WRITTEN = tuple(Path(name) for name in ("data", "artifacts", "metrics", "reports", ".work"))


def run_stage(run: "Callable[[Params], None]") -> None:
    """`run_command` with what is in `params.yaml`, where the stages' folders can be written."""

    def with_params() -> None:
        from slipway.config.params import load_params  # what runs without params.yaml lacks the package that reads it, too

        params = load_params()
        try_to_write(_WRITTEN)
        run(params)

    run_command(with_params)


def run_command(run: Callable[[], None]) -> None:
    """Call `run()`; what the user can mend becomes a message on stderr and exit code 1, Ctrl-C exit code 130."""
    try:
        run()
    except SlipwayError as error:
        _end(_with_notes(str(error), error), 1)
    except KeyboardInterrupt:
        _end("interrupted.", 130)
    except Exception as error:
        fault = disk_fault(error)
        if fault is None:  # a fault of ours keeps its traceback
            raise
        _end(_with_notes(fault, error), 1)


def _with_notes(text: str, error: Exception) -> str:
    return " ".join([text, *getattr(error, "__notes__", [])])


def _end(text: str, exit_code: int) -> None:
    print(f"\nerror: {text}", file=sys.stderr)
    sys.exit(exit_code)
