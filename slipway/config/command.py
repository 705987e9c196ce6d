"""Runs a stage as a command: reads params.yaml, and turns errors into messages and exit codes."""

import logging
import os
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

# The same as in env.sh, for `dvc repro` outside a clone. OpenMP reads it when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

WRITTEN = tuple(Path(name) for name in ("data", "artifacts", "metrics", "reports", ".work"))


def run_stage(run: "Callable[[Params], None]") -> None:
    """Run a stage as a command: `run` receives the checked content of `params.yaml`.

    First checks that the output folders are writable. The stage's inputs are sealed while it runs.
    """

    def with_params() -> None:
        # Commands without params.yaml also run where ruamel.yaml is not installed.
        from slipway.config.params import parse_params, read_content
        from slipway.config.seals import sealed

        content = read_content()
        params = parse_params(content)
        try_to_write(WRITTEN)
        with sealed(_stage_name(), content):
            run(params)

    run_command(with_params)


def _stage_name() -> str | None:
    """Return NAME if this process runs `python -m slipway.stages.NAME`; else None."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package, _, name = getattr(spec, "name", "").rpartition(".")
    return name if package == "slipway.stages" else None


@quiet_when_unread()
def run_command(run: Callable[[], None]) -> None:
    """Call `run`. Errors that the user can fix exit with code 1 and a message, Ctrl-C with 130."""
    switch_off_telemetry()
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
