"""Runs NVIDIA's Triton server, from the package nvidia-pytriton in a separate environment.

The package has the server with its Python backend only. A backend of this file takes the place of
Triton's `onnxruntime` backend: the server reads the repository, batches, and speaks gRPC; ONNX
Runtime for Python computes.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException

from slipway.export.targets.edge.environment import install
from slipway.system.errors import UnavailableError
from tests.serving.server import free_port

# With numpy 2 the package's Python backend answers with empty tensors.
PACKAGES = ("nvidia-pytriton==0.7.0", "numpy<2", "onnxruntime")
BACKEND = """
import onnxruntime
import triton_python_backend_utils as backend

class TritonPythonModel:
    def initialize(self, args):
        graph = f"{args['model_repository']}/{args['model_version']}/model.onnx"
        self.session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        self.inputs = [one.name for one in self.session.get_inputs()]
        self.outputs = [one.name for one in self.session.get_outputs()]

    def execute(self, requests):
        return list(map(self.answer, requests))

    def answer(self, request):
        rows = {
            name: backend.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs
        }
        found = zip(self.outputs, self.session.run(self.outputs, rows))
        return backend.InferenceResponse([backend.Tensor(*one) for one in found])
"""
START_S = 60.0


def install_server(folder: Path) -> Path:
    """Install the server in `folder`. Returns the folder of its packages.

    Raises UnavailableError without uv or the package index, and on a machine without a wheel.
    """
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(PACKAGES))
    install(folder / "environment", requirements)
    packages = next((folder / "environment").glob("lib/python*/site-packages"))
    server = packages / "pytriton/tritonserver"
    shutil.copytree(server / "backends", folder / "backends")
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = server / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.exists():
        raise UnavailableError(f"nvidia-pytriton has no backend for Python {python}")
    shutil.copy(stub, folder / "backends/python")
    (folder / "backends/onnxruntime").mkdir()
    (folder / "backends/onnxruntime/model.py").write_text(BACKEND)
    return packages


@contextmanager
def nvidia_server(
    folder: Path, packages: Path, repositories: Sequence[Path], models: Sequence[str]
) -> Iterator[str]:
    """Start the server on model repositories. Yields the address of its gRPC port."""
    port, log = free_port(), folder / "server.log"
    environment = {
        "PATH": os.pathsep.join([str(folder / "environment/bin"), os.defpath]),
        "VIRTUAL_ENV": str(folder / "environment"),
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
        "ORT_DISABLE_TELEMETRY": "1",
    }
    command = [
        str(packages / "pytriton/tritonserver/bin/tritonserver"),
        *(f"--model-repository={repository}" for repository in repositories),
        f"--backend-directory={folder / 'backends'}",
        *("--allow-http=false", "--allow-metrics=false", "--grpc-address=127.0.0.1"),
        f"--grpc-port={port}",
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    try:
        end = time.monotonic() + START_S
        while not _is_ready(client, models):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        client.close()
        process.terminate()
        process.wait()


def _is_ready(client: triton.InferenceServerClient, models: Sequence[str]) -> bool:
    try:
        return all(client.is_model_ready(name) for name in models)
    except InferenceServerException:
        return False
