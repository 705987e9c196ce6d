"""`slipway export browser` and the other places."""

from pathlib import Path

import click

_PATH = click.Path(path_type=Path)
_EXISTING = click.Path(exists=True, path_type=Path)
_VARIANT = click.option(
    "--variant", metavar="NAME", help="Variant of the bundle, such as int8; default: fp32."
)


def _out(target: str) -> Path:
    return Path("artifacts/exports") / target


@click.command()
@click.option("--out", type=_PATH, help="Folder to write; default: artifacts/exports/browser.")
@click.option(
    "--runtime",
    type=_EXISTING,
    metavar="FOLDER_OR_TGZ",
    help="onnxruntime-web, as `npm pack onnxruntime-web` gives it.",
)
@click.option("--download", is_flag=True, help="Let npm fetch onnxruntime-web.")
@_VARIANT
def browser(out: Path | None, runtime: Path | None, download: bool, variant: str | None) -> None:
    """Write a page that answers in the browser, and certify it in Chromium.

    The folder works from any static host, and from the disk. It makes no connection.
    """
    from slipway.export.targets.browser.export import export_browser

    click.echo(export_browser(out or _out("browser"), runtime, variant, download=download))


@click.command()
@click.option("--out", type=_PATH, help="Folder to write; default: artifacts/exports/edge.")
@click.option(
    "--variant", metavar="NAME", help="Variant of the bundle; default: the choice for a CPU."
)
def edge(out: Path | None, variant: str | None) -> None:
    """Write a script with its model, and certify it in an environment of its own.

    It needs onnxruntime, numpy and Pillow. The limits of `edge` in params.yaml must be met.
    """
    from slipway.export.targets.edge.export import EDGE, export_script

    click.echo(export_script(EDGE, out or _out("edge"), variant))


@click.command()
@click.option("--out", type=_PATH, help="Folder to write; default: artifacts/exports/openvino.")
@_VARIANT
def openvino(out: Path | None, variant: str | None) -> None:
    """Write a script with its model for OpenVINO, and certify it in an environment of its own.

    Operators that OpenVINO lacks are named, and nothing is written.
    """
    from slipway.export.targets.edge.export import OPENVINO, export_script

    click.echo(export_script(OPENVINO, out or _out("openvino"), variant))


_NAME = click.option("--name", default="model", help="Name of the model on the server; model.")
_SERVER = click.option(
    "--server",
    metavar="HOST:PORT",
    help="gRPC of a server that has loaded the folder: ask it every test row.",
)


@click.command()
@click.option("--out", type=_PATH, help="Folder to write; default: artifacts/exports/triton.")
@_NAME
@_SERVER
@_VARIANT
def triton(out: Path | None, name: str, server: str | None, variant: str | None) -> None:
    """Write a model repository for NVIDIA's Triton.

    Batching is that of `slipway tune serving`, if it measured this model.
    """
    from slipway.export.targets.triton.export import ServerExport, export_server

    given = ServerExport("triton", name, "", server)
    click.echo(export_server(given, out or _out("triton"), variant))


@click.command()
@click.option("--out", type=_PATH, help="Folder to write; default: artifacts/exports/kserve.")
@click.option(
    "--storage-uri",
    required=True,
    metavar="URI",
    help="Where model_repository will be copied to, such as pvc://models/digits.",
)
@_NAME
@_SERVER
@_VARIANT
def kserve(
    out: Path | None, storage_uri: str, name: str, server: str | None, variant: str | None
) -> None:
    """Write an InferenceService of KServe, with the model repository for its Triton.

    Batching is that of `slipway tune serving`, if it measured this model.
    """
    from slipway.export.targets.triton.export import ServerExport, export_server

    given = ServerExport("kserve", name, storage_uri, server)
    click.echo(export_server(given, out or _out("kserve"), variant))
