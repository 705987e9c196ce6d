"""`slipway export` and `slipway release`."""

import click

from slipway.cli.command import is_quiet
from slipway.export.again import export_again
from slipway.export.release import release as release_bundle


@click.command()
def release() -> None:
    """Save the certified bundle as the reference model of later runs.

    It is copied to artifacts/reference_model. A bundle that is not certified, or that missed a
    quality gate, is refused.
    """
    click.echo(release_bundle())


@click.command()
@click.option("--force", is_flag=True, help="Also run stages whose inputs have not changed.")
def export(force: bool) -> None:
    """Export, compile and certify the trained model again; train nothing.

    Runs the stages export, compile and verify, such as after a change of export.variants.
    """
    export_again(force=force, is_quiet=is_quiet())
