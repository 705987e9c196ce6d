"""Runs a stage as a command, with checked params and sealed inputs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slipway.system.command_run import run_command
from slipway.system.disk_faults import try_to_write

if TYPE_CHECKING:
    from slipway.config.params import Params

WRITTEN = tuple(Path(name) for name in ("data", "artifacts", "metrics", "reports", ".work"))


def run_stage(run: "Callable[[Params], None]") -> None:
    """Run a stage as a command: `run` receives the checked content of `params.yaml`.

    First checks that the output folders are writable. The stage's inputs are sealed while it runs.
    """

    def with_params() -> None:
        # Commands without params.yaml also run where ruamel.yaml is not installed.
        from slipway.config.params import parse_params, read_content, resolved
        from slipway.config.seals import sealed

        content = read_content()
        params = parse_params(content)
        try_to_write(WRITTEN)
        with sealed(_stage_name(), resolved(content)):
            run(params)

    run_command(with_params)


def _stage_name() -> str | None:
    """Return NAME if this process runs `python -m slipway.stages.NAME`; else None."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package, _, name = getattr(spec, "name", "").rpartition(".")
    return name if package == "slipway.stages" else None
