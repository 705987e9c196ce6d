"""Starts a real service with a tiny certified bundle, and waits until it is ready."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx

from tests.serving.bundles import certify, write_bundle
from tests.serving.server import Server, running


@contextmanager
def ready_service(
    folder: Path, graph: onnx.ModelProto | None = None, **settings: Any
) -> Iterator[Server]:
    """Write bundle and certificate to `folder`; `settings` are further SLIPWAY_ variables."""
    certify(folder / "certificate.json", write_bundle(folder / "bundle", graph))
    with running(folder, **settings) as server:
        server.wait()
        yield server
