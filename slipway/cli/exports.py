"""The commands `slipway export PLACE`, such as `slipway export browser`."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

_EXISTING = click.Path(exists=True, path_type=Path)
_NAME = click.option("--name", default="model", help="Name of the model on the server; model.")
_SERVER = click.option(
    "--server",
    metavar="HOST:PORT",
    help="gRPC of a server that has loaded the folder: ask it every test row.",
)
_AARCH64 = click.option(
    "--aarch64-system",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Files of an aarch64 system: run the script there, too, under QEMU.",
)


def _place(*options: Any, variant: str = "fp32") -> Callable[[Callable[..., str]], click.Command]:
    """Turn a function that writes `out` and returns a summary into a command.

    The command has the function's name, the options --out and --variant, and `options`.
    """

    def command(write: Callable[..., str]) -> click.Command:
        folder = Path("artifacts/exports") / write.__name__

        @wraps(write)
        def run(**given: Any) -> None:
            click.echo(write(**given))

        of_variant = f"Variant of the bundle, such as int8; default: {variant}."
        common = (
            click.option(
                "--out",
                type=click.Path(path_type=Path),
                default=folder,
                help=f"Folder to write; default: {folder}.",
            ),
            click.option("--variant", metavar="NAME", help=of_variant),
        )
        for option in reversed([*options, *common]):
            run = option(run)
        return click.command(write.__name__)(run)

    return command


@_place(
    click.option(
        "--runtime",
        type=_EXISTING,
        metavar="FOLDER_OR_TGZ",
        help="onnxruntime-web, as `npm pack onnxruntime-web` gives it.",
    ),
    click.option("--download", is_flag=True, help="Let npm fetch onnxruntime-web."),
    click.option("--webgpu", is_flag=True, help="Answer by WebGPU in browsers that have it."),
)
def browser(
    out: Path, variant: str | None, runtime: Path | None, download: bool, webgpu: bool
) -> str:
    """Write a web page that runs the model in the browser, and certify it in Chromium.

    The folder works on any static host, and from the disk. The page opens no connection.
    """
    from slipway.export.targets.browser.export import export_browser

    return export_browser(out, runtime, variant, download=download, webgpu=webgpu)


@_place(_AARCH64, variant="the choice for a CPU")
def edge(out: Path, variant: str | None, aarch64_system: Path | None) -> str:
    """Write a script with its model, and certify it in a separate environment.

    The script needs onnxruntime, numpy and Pillow. The model must meet the limits of `edge` in
    params.yaml.
    """
    from slipway.export.targets.edge.export import EDGE, export_script

    return export_script(EDGE, out, variant, aarch64_system)


@_place(_AARCH64)
def openvino(out: Path, variant: str | None, aarch64_system: Path | None) -> str:
    """Write a script with its model for OpenVINO, and certify it in a separate environment.

    If OpenVINO lacks an operator of the model, the operator is named and nothing is written.
    """
    from slipway.export.targets.edge.export import OPENVINO, export_script

    return export_script(OPENVINO, out, variant, aarch64_system)


@_place(_NAME, _SERVER)
def triton(out: Path, variant: str | None, name: str, server: str | None) -> str:
    """Write a model repository for NVIDIA's Triton.

    The batching is what `slipway tune serving` measured for this model, if it did.
    """
    from slipway.export.targets.triton.export import ServerExport, export_server

    return export_server(ServerExport("triton", name, "", server), out, variant)


@_place(
    click.option(
        "--storage-uri",
        required=True,
        metavar="URI",
        help="Where model_repository will be copied to, such as pvc://models/digits.",
    ),
    _NAME,
    _SERVER,
)
def kserve(out: Path, variant: str | None, storage_uri: str, name: str, server: str | None) -> str:
    """Write an InferenceService of KServe, with the model repository for its Triton.

    The batching is what `slipway tune serving` measured for this model, if it did.
    """
    from slipway.export.targets.triton.export import ServerExport, export_server

    return export_server(ServerExport("kserve", name, storage_uri, server), out, variant)


@_place()
def mlflow(out: Path, variant: str | None) -> str:
    """Write a model of MLflow, and certify it by mlflow.pyfunc.

    The model contains the graph only; PREPROCESSING.md tells callers how to make its tensors.
    """
    from slipway.export.targets.layouts import export_layout

    return export_layout("mlflow", out, variant)


@_place()
def huggingface(out: Path, variant: str | None) -> str:
    """Write a repository of the Hugging Face hub, with a model card, and certify it.

    The repository contains the graph only; PREPROCESSING.md tells callers how to make its tensors.
    Nothing is uploaded.
    """
    from slipway.export.targets.layouts import export_layout

    return export_layout("huggingface", out, variant)
