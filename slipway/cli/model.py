"""The commands for a finished model: `slipway export` and `slipway release`."""

import subprocess
import sys
from pathlib import Path

import click

from slipway.cli.command import is_quiet
from slipway.export.release import release as release_bundle
from slipway.export.release import verify_bundle as verify_release
from slipway.system.errors import UnavailableError

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_STAGES = ("export", "compile", "verify")
_MODEL = Path("artifacts/model/model.json")
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.option("--sign", type=_FILE, metavar="KEY", help="Sign it with this private key (PEM).")
def release(sign: Path | None) -> None:
    """Save the certified bundle as the reference model of later runs.

    The bundle is copied to artifacts/reference_model. A bundle that is not certified, or that
    missed a quality gate, is refused.
    """
    click.echo(release_bundle(sign))


@click.command()
@click.argument("folder", type=_FOLDER)
@click.option(
    "--key",
    "keys",
    type=_FILE,
    multiple=True,
    metavar="KEY",
    help="Require a signature by this public key; may be repeated.",
)
@click.option("--key-list", type=_FILE, metavar="LIST", help="Refuse keys that this list ends.")
def verify_bundle(folder: Path, keys: tuple[Path, ...], key_list: Path | None) -> None:
    """Check a bundle: its files, its certificate, its gates and its signature.

    The key list is a JSON file with keys that expire or were revoked.
    """
    click.echo(verify_release(folder, keys, key_list))


@click.command()
@click.option("--force", is_flag=True, help="Also run stages whose inputs have not changed.")
def export(force: bool) -> None:
    """Export, compile and certify the trained model again; train nothing.

    Runs the stages export, compile and verify, for example after a change of export.variants. With
    a place such as `browser`, writes the certified model for it instead, and certifies it there.
    """
    _export_again(force=force, is_quiet=is_quiet())


def _export_again(*, force: bool, is_quiet: bool = False) -> None:
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
