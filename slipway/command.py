"""Runs a stage as a command: params in, exit code out, errors as one readable message."""

import sys
from collections.abc import Callable

from slipway.errors import SlipwayError
from slipway.params import Params, load_params


def run_stage(run: Callable[[Params], None]) -> None:
    """Call `run(params)`; a SlipwayError becomes its message on stderr and exit code 1."""
    try:
        run(load_params())
    except SlipwayError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        sys.exit(1)
