"""The trained network itself, where torch and the very checkpoint are there; a service's machine has neither, and says so."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway import files
from slipway.bundle import LoadedBundle
from slipway.errors import UnavailableError

_WEIGHTS = "weights.safetensors"


def torch_outputs(checkpoint: Path, bundle: LoadedBundle, inputs: NDArray[Any]) -> NDArray[np.float32]:
    """(rows, outputs) in the bundle's order of labels; UnavailableError with the reason where it cannot run here."""
    _require(checkpoint, bundle)
    from slipway.export.hops import TorchRunner, in_order_of
    from slipway.training.networks import load_network

    network = load_network(checkpoint)
    outputs = TorchRunner(network, bundle.manifest.output).run(inputs)
    return in_order_of(bundle.manifest.output.labels, network.spec.classes, outputs)


def _require(checkpoint: Path, bundle: LoadedBundle) -> None:
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("torch is not installed")
    path = checkpoint / _WEIGHTS
    made_of = next((digest for name, digest in bundle.manifest.lineage.digests.items() if name.endswith(_WEIGHTS)), None)
    if made_of is None:
        raise UnavailableError("the bundle does not say of which weights it was made")
    if not path.is_file():
        raise UnavailableError(f"{path} is not there")
    found = files.sha256_file(path)
    if found != made_of:
        raise UnavailableError(f"{path} is {found[:12]}, the bundle was made of {made_of[:12]}")
