"""Repeats export and certification of a trained model, without the stages before `export`."""

import subprocess
import sys
from pathlib import Path

from slipway.system.errors import UnavailableError

_STAGES = ("export", "compile", "verify")
_MODEL = Path("artifacts/model/model.json")


def export_again(*, force: bool, is_quiet: bool = False) -> None:
    """Run the stages from `export` to `verify` with DVC.

    With `is_quiet`, their output is printed only if a stage fails. Raises UnavailableError if one
    fails, or if there is no trained model.
    """
    if not _MODEL.is_file():
        raise UnavailableError(
            f"there is no trained model in {_MODEL.parent.absolute()} yet, expected the model of a "
            "finished `train`. Make it with `slipway run` in the project's folder."
        )
    options = ["--single-item", *["--force"] * force]
    command = [sys.executable, "-m", "dvc", "repro", *options, *_STAGES]
    output = subprocess.PIPE if is_quiet else None
    done = subprocess.run(command, stdout=output, stderr=output and subprocess.STDOUT, text=True)
    if done.returncode:
        print(end=done.stdout or "", flush=True)
        raise UnavailableError(
            "the model was not exported: the stage above ended with an error, expected all of "
            f"{', '.join(_STAGES)} to finish. Correct that error, and run `slipway export` again."
        )
