"""Starts the gateway in its own process, as an operator does."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx

from tests.serving.bundles import certify, write_bundle
from tests.serving.server import ROOT, Server, environment, free_port

SETTINGS = "SLIPWAY_DRAIN_S=0\nSLIPWAY_REQUEST_TIMEOUT_S=1\nSLIPWAY_NUM_THREADS=1\n"


def write_models(folder: Path, **graphs: onnx.ModelProto | None) -> None:
    """Write one project for each graph (None: the image classifier), and their models.toml."""
    lines = []
    for name, graph in graphs.items():
        artifacts = folder / name / "artifacts"
        certify(artifacts / "certificate.json", write_bundle(artifacts / "bundle", graph))
        (folder / name / "serving.env").write_text(SETTINGS)
        lines.append(f'[models.{name}]\nfolder = "{name}"\n')
    (folder / "models.toml").write_text("".join(lines))


@contextmanager
def running_gateway(folder: Path, *options: str) -> Iterator[Server]:
    """Serve the models of `folder/models.toml`, and end the gateway by SIGTERM."""
    variables = {
        name: value
        for name, value in environment(folder).items()
        if not name.startswith("SLIPWAY_")
    }
    port, log = free_port(), folder / "gateway.log"
    command = [sys.executable, "-m", "slipway.cli", "serve", "--models", "models.toml"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *options],
            cwd=folder,
            env=variables | {"PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Server(process, f"http://127.0.0.1:{port}", log)
    finally:
        process.terminate()
        process.wait(40)
