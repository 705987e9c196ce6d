"""Output of `prune`: a pruned network with its calibration, or a record that nothing was pruned.

artifacts/pruned/model.json                  kind null, or the network and its origin
artifacts/pruned/weights.safetensors         float32 weights, whose shapes define the network
artifacts/pruned/ood_score.safetensors   statistics of its OOD score
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slipway.artifacts.training_setup import TrainingSetup
from slipway.artifacts.uncertainty import Calibration
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import SchemaError
from slipway.training.networks.networks import (
    Network,
    NetworkSpec,
    build_network,
    example_rows,
    load_tensors,
    serialize_tensors,
)
from slipway.training.uncertainty.calibrated_network import CalibratedNetwork, calibrated
from slipway.training.uncertainty.ood_score import OODScore, save_ood_score

_FIX = "Run `dvc repro prune`."
_WEIGHTS, _SCORE = "weights.safetensors", "ood_score.safetensors"


class Width(Contract):
    """The number of channels of a layer, before and after pruning."""

    before: int
    after: int


class PrunedManifest(Contract):
    """The content of `model.json`; equal runs write equal files."""

    format_version: Literal[2]
    kind: Literal["structured", "magnitude"]
    network: NetworkSpec  # spec of the trained model; `widths` lists the narrower layers
    sparsity: float  # requested fraction
    widths: dict[str, Width]  # channels by layer; empty for magnitude
    num_parameters: int
    num_zeros: int  # number of zeros among the parameters
    pruned_from: str  # hex SHA-256 of the trained model's weights
    weights_sha256: str
    calibration: Calibration
    epochs: int  # epochs of the fine-tuning
    learning_rate: float
    seed: int
    requested: TrainingSetup
    actual: TrainingSetup


def pruned_network(spec: NetworkSpec, weights: Mapping[str, Tensor]) -> Network:
    """Build the network of `spec` with the widths that `weights` have.

    The network is on the CPU in evaluation mode. Raises SchemaError if the weights do not fit.
    """
    network = build_network(spec).eval()
    try:
        for name, value in weights.items():
            owner, _, last = name.rpartition(".")
            module = network.get_submodule(owner)
            current = getattr(module, last)
            if current.shape != value.shape:
                resized = torch.empty_like(value)
                is_parameter = isinstance(current, nn.Parameter)
                setattr(module, last, nn.Parameter(resized) if is_parameter else resized)
        network.load_state_dict(dict(weights), strict=True)
        with torch.no_grad():
            network(example_rows(spec))
    except (AttributeError, RuntimeError) as error:
        raise SchemaError(
            f"the pruned weights do not fit the network {spec.name!r}: {error} {_FIX}"
        ) from error
    return network


def save_pruned(
    folder: Path, manifest: PrunedManifest, weights: Mapping[str, Tensor], score: OODScore
) -> None:
    """Write the pruned network to `folder`, replacing its whole content."""
    with files.new_directory(folder) as partial:
        files.write_bytes(partial / _WEIGHTS, serialize_tensors(weights))
        save_ood_score(partial / _SCORE, score)
        files.write_json(partial / "model.json", manifest.model_dump(mode="json"))


def read_pruned(folder: Path, model_sha256: str) -> PrunedManifest | None:
    """Read the manifest in `folder`; return None if no network was pruned.

    Raises SchemaError unless the network was pruned from the weights with the digest
    `model_sha256`.
    """
    path = folder / "model.json"
    try:
        content: Any = json.loads(path.read_bytes())
        if content == {"format_version": 2, "kind": None}:
            return None
        manifest = PrunedManifest.model_validate(content)
    except (FileNotFoundError, NotADirectoryError):
        raise SchemaError(f"{path} is missing. {_FIX}") from None
    except ValueError as error:  # pydantic's and json's are both ValueErrors
        raise SchemaError(f"{path} is not what the prune stage writes: {error}. {_FIX}") from error
    if manifest.pruned_from != model_sha256:
        raise SchemaError(
            f"{folder} was pruned from weights {manifest.pruned_from[:12]}, the model has "
            f"{model_sha256[:12]}. {_FIX}"
        )
    return manifest


def load_pruned(folder: Path, manifest: PrunedManifest) -> CalibratedNetwork:
    """Load the pruned network with its calibration, on the CPU.

    Raises SchemaError if a file is missing or does not fit, IntegrityError if one was altered.
    """
    weights = load_tensors(folder / _WEIGHTS, manifest.weights_sha256, _FIX)
    network = pruned_network(manifest.network, weights)
    return calibrated(network, manifest.calibration, folder / _SCORE)
