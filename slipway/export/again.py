"""Exports and certifies a trained model again, without the stages before."""

import subprocess
import sys
from pathlib import Path

from slipway.system.errors import UnavailableError

_STAGES = ("export", "compile", "verify")
_MODEL = Path("artifacts/model/model.json")


def export_again(*, force: bool) -> None:
    """Run the stages from `export` on by DVC. UnavailableError if one fails, or without a model."""
    if not _MODEL.is_file():
        raise UnavailableError(
            f"there is no trained model in {_MODEL.parent.absolute()} yet, expected that of a "
            "finished `train`. Make it with `slipway run` in the project's folder."
        )
    options = ["--single-item", *["--force"] * force]
    command = [sys.executable, "-m", "dvc", "repro", *options, *_STAGES]
    if subprocess.run(command).returncode:
        raise UnavailableError(
            "the model was not exported: the stage above ended with an error, expected all of "
            f"{', '.join(_STAGES)}. Correct what it names, and run `slipway export` again."
        )
