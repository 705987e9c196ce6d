"""The commands that answer requests: `slipway predict` and `slipway serve`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import click

from slipway.cli.command import is_quiet, say


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    default=".",
    help="A project, its artifacts or a bundle; by default the working directory.",
)
@click.option("--encoding", help="Encoding of a CSV or of text files; by default that of training.")
@click.option("--overwrite", is_flag=True, help="Replace DESTINATION if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def predict(
    source: Path,
    destination: Path,
    model: Path,
    encoding: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Answer every image of a folder, or every row of a table.

    SOURCE is an image, a folder of images, a .csv, .parquet, .jsonl or .xlsx file, or a folder of
    shards. DESTINATION is one of these files with all rows in order; a bad row has
    its error in place of an answer. After an interrupt, the same command continues.
    """
    from slipway.inference.files import predict_files

    is_hidden = is_quiet() or as_json or not sys.stderr.isatty()
    with click.progressbar(length=1, label="rows", file=sys.stderr, hidden=is_hidden) as bar:

        def show(done: int, total: int | None) -> None:
            bar.length = total or done
            bar.update(done - bar.pos)

        done = predict_files(
            model, source, destination, encoding=encoding, overwrite=overwrite, on_progress=show
        )
    if as_json:
        counts: dict[str, Any] = dataclasses.asdict(done) | {"answered": done.answered}
        click.echo(json.dumps(counts | {"destination": str(destination)}))
        return
    faults = ", ".join(f"{number} {code}" for code, number in done.faults.items())
    say(
        f"{done.answered} of {done.rows} rows answered in {done.seconds:.1f} s, in {destination}"
        + f"; without an answer: {faults} (the column `error` says why)" * bool(faults)
    )


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    envvar="BENTOML_HOST",
    help="Address to listen on; also as BENTOML_HOST.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=3000,
    show_default=True,
    envvar="BENTOML_PORT",
    help="Port to listen on; also as BENTOML_PORT.",
)
@click.option("--models", type=click.Path(path_type=Path), help="Serve the models of this file.")
@click.option("--grpc-port", type=click.IntRange(1, 65535), help="With --models: serve gRPC, too.")
@click.argument("options", nargs=-1, metavar="[BENTOML_OPTION]...", type=click.UNPROCESSED)
def serve(
    host: str, port: int, models: Path | None, grpc_port: int | None, options: tuple[str, ...]
) -> None:
    """Start the service of the project in the working directory.

    Settings are SLIPWAY_ variables of the environment, then those of serving.env. Options of
    `bentoml serve` are passed to it.

    With --models, several projects are served at one address, each below /models/NAME/.
    """
    if models:
        if options:
            raise click.UsageError(f"--models takes no further options, found {options[0]}")
        from slipway.serving.gateway.serve import serve_models

        serve_models(models, host, port, grpc_port or 0)
        return
    if grpc_port:
        raise click.UsageError("--grpc-port needs --models; one model has SLIPWAY_GRPC_PORT")
    from slipway.serving.process.launch import launch

    launch(host, port, [*(["--quiet"] if is_quiet() else []), *options])
