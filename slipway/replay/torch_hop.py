"""The trained network itself, where torch and the very checkpoint are there; a service's machine has neither, and says so."""

import importlib.util
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.uncertainty import Answers
from slipway.system import files
from slipway.system.errors import UnavailableError

_WEIGHTS = "weights.safetensors"
_STATISTICS = "outlier_score.safetensors"  # beside the checkpoint


def torch_answers(checkpoint: Path, bundle: LoadedBundle, inputs: NDArray[Any]) -> Answers:
    """Of the network with the bundle's calibration, columns in the bundle's order of labels.

    UnavailableError, IntegrityError or SchemaError with the reason where it cannot run here.
    """
    _require(checkpoint, bundle)
    from slipway.export.certification.hops import TorchRunner, in_order_of
    from slipway.training.networks.networks import load_network
    from slipway.training.uncertainty.calibrated_network import calibrated

    network, manifest = load_network(checkpoint), bundle.manifest
    outputs, scores = TorchRunner(
        calibrated(network, manifest.calibration, checkpoint.parent / _STATISTICS)
    ).run(inputs)
    return Answers(in_order_of(manifest.output.labels, network.spec.classes, outputs), scores)


def _require(checkpoint: Path, bundle: LoadedBundle) -> None:
    if importlib.util.find_spec("torch") is None:
        raise UnavailableError("torch is not installed")
    path = checkpoint / _WEIGHTS
    made_of = next(
        (
            digest
            for name, digest in bundle.manifest.lineage.digests.items()
            if name.endswith(_WEIGHTS)
        ),
        None,
    )
    if made_of is None:
        raise UnavailableError("the bundle does not say of which weights it was made")
    if not path.is_file():
        raise UnavailableError(f"{path} is not there")
    found = files.sha256_file(path)
    if found != made_of:
        raise UnavailableError(f"{path} is {found[:12]}, the bundle was made of {made_of[:12]}")
