"""Loads a new model once in a child process, so that a crash of its runtime harms no worker.

`python -m slipway.serving.rollout.rehearsal BUNDLE CERTIFICATE ENGINE` verifies every file, warms
up each batch size and predicts the golden rows, as a worker does, with the SLIPWAY_ settings of its
environment. It runs at low priority. If a model is refused, it prints the reason in one line on
stderr.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from slipway.predictor.loader import read_certified
from slipway.serving.models.loader import load_model
from slipway.serving.rollout.state import RolloutError
from slipway.serving.settings import ROOT, Settings, read_settings
from slipway.system.errors import SlipwayError

_NICENESS = 10
_TIMEOUT_S = 600.0  # equal to PREPARE_S
_MAX_CHARACTERS = 2000  # most characters of stderr in the error


def rehearse(settings: Settings) -> None:
    """Load the model in a child process. Raises RolloutError with its stderr or its end signal."""
    paths = map(str, (settings.bundle, settings.certificate, settings.engine))
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, *paths],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise RolloutError(
            f"a separate process could not load the model within {_TIMEOUT_S:g} s."
        ) from None
    if done.returncode > 0:
        raise RolloutError(
            done.stderr.strip()[-_MAX_CHARACTERS:]
            or f"its process ended with exit code {done.returncode} and wrote nothing to stderr."
        )
    if done.returncode:
        raise RolloutError(
            f"its process was ended by {signal.Signals(-done.returncode).name} while it was loaded."
        )


def main(arguments: list[str]) -> int:
    """Load the model in this process. Returns 0, or 1 after one line with the reason on stderr."""
    os.nice(_NICENESS)
    bundle, certificate, engine = map(Path, arguments)
    try:
        settings = read_settings().model_copy(
            update={"bundle": bundle, "certificate": certificate, "engine": engine}
        )
        # `add_model` has checked the quality gates, which depend on the mode.
        load_model(
            settings,
            read_certified(bundle, certificate, accept_draft=False, accept_missed_gates=True),
        )
    except SlipwayError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
