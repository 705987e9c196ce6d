"""A new model is loaded once in a process of its own, before any worker touches it: what crashes a runtime crashes nothing else.

`python -m serving.rollout.rehearsal BUNDLE CERTIFICATE ENGINE` checks every file, warms each batch size up and answers the golden rows,
as a worker does, with the SLIPWAY_ settings of its environment. It is nice, and says in one line on stderr why a model is refused.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

from serving.models.loading import load_model, read_certified
from serving.rollout.state import RolloutError
from serving.settings import ROOT, Settings, read_settings
from slipway.system.errors import SlipwayError

_NICENESS = 10
_LONGEST_S = 600.0  # as PREPARE_S
_LAST_WORDS = 2000  # characters


def rehearse(settings: Settings) -> None:
    """Load the model of `settings` there. RolloutError with the process' last words, or with the signal that ended it."""
    command = [
        sys.executable,
        "-m",
        __name__,
        *map(str, (settings.bundle, settings.certificate, settings.engine)),
    ]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        raise RolloutError(
            f"it was not loaded within {_LONGEST_S:g} s, in a process of its own."
        ) from None
    if done.returncode > 0:
        raise RolloutError(
            done.stderr.strip()[-_LAST_WORDS:]
            or f"its process ended with exit code {done.returncode} and said nothing."
        )
    if done.returncode:
        raise RolloutError(
            f"its process was ended by {signal.Signals(-done.returncode).name} while it was loaded."
        )


def main(arguments: list[str]) -> int:
    """What the process does: 0, or 1 with one line on stderr."""
    os.nice(_NICENESS)
    bundle, certificate, engine = map(Path, arguments)
    try:
        settings = read_settings().model_copy(
            update={"bundle": bundle, "certificate": certificate, "engine": engine}
        )
        # `add_model` has judged the quality gates, by what the model is to do.
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
