"""Runs a stage as a command: params in, exit code out, errors as one readable message."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slipway.system.broken_pipe import quiet_when_unread
from slipway.system.disk_faults import disk_fault, try_to_write
from slipway.system.errors import SlipwayError
from slipway.system.telemetry import switch_off_telemetry

if TYPE_CHECKING:
    from slipway.config.params import Params

WRITTEN = tuple(Path(name) for name in ("data", "artifacts", "metrics", "reports", ".work"))


def run_stage(run: "Callable[[Params], None]") -> None:
    """`run_command` with what is in `params.yaml`, where the stages' folders can be written; the inputs of a stage are sealed."""

    def with_params() -> None:
        # What runs without params.yaml lacks the package that reads it, too.
        from slipway.config.params import parse_params, read_content
        from slipway.config.sealing import sealed

        content = read_content()
        params = parse_params(content)
        try_to_write(WRITTEN)
        with sealed(_stage_name(), content):
            run(params)

    run_command(with_params)


def _stage_name() -> str | None:
    """NAME if this process was started as `python -m stages.NAME`."""
    package, _, name = getattr(
        getattr(sys.modules["__main__"], "__spec__", None), "name", ""
    ).partition(".")
    return name if package == "stages" else None


@quiet_when_unread()
def run_command(run: Callable[[], None]) -> None:
    """Call `run()`; what the user can mend becomes a message on stderr and exit code 1, Ctrl-C exit code 130."""
    switch_off_telemetry()
    try:
        run()
        print(end="", flush=True)  # a full disk is told here, too
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
