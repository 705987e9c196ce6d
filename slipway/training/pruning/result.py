"""What `prune` leaves: a smaller network with a calibration of its own, or the word that none was asked for.

artifacts/pruned/model.json                  kind null, or what the network is and how it was made
artifacts/pruned/weights.safetensors         its weights in float32, in whose shapes the network is built again
artifacts/pruned/outlier_score.safetensors   what its outlier score is computed with
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from slipway.artifacts.uncertainty import Calibration
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import IntegrityError, SchemaError
from slipway.training.networks.networks import Network, NetworkSpec, TrainingSetup, build_network
from slipway.training.uncertainty.calibrated import CalibratedNetwork, calibrated
from slipway.training.uncertainty.outlier_score import OutlierScore, save_outlier_score

_FIX = "Run `dvc repro prune`."
_WEIGHTS, _SCORE = "weights.safetensors", "outlier_score.safetensors"


class Width(Contract):
    """Channels of a layer."""

    before: int
    after: int


class PrunedCard(Contract):
    """The content of `model.json`; equal runs write equal text."""

    format_version: Literal[1]
    kind: Literal["structured", "magnitude"]
    network: NetworkSpec  # that of the checkpoint: `widths` says what is narrower
    share: float  # that was asked for
    widths: dict[str, Width]  # channels by layer; empty for magnitude
    num_parameters: int
    num_zeros: int  # among them
    pruned_from: str  # hex SHA-256 of the weights of the checkpoint
    weights_sha256: str
    calibration: Calibration  # its own
    epochs: int  # of the fine-tune
    learning_rate: float
    seed: int
    requested: TrainingSetup
    actual: TrainingSetup


def network_of(spec: NetworkSpec, weights: Mapping[str, Tensor]) -> Network:
    """The network of `spec` in the widths of `weights`, on the CPU in evaluation mode; SchemaError where they are not of one."""
    network = build_network(spec).eval()
    try:
        for name, value in weights.items():
            owner, _, last = name.rpartition(".")
            module = network.get_submodule(owner)
            held = getattr(module, last)
            if held.shape != value.shape:
                setattr(
                    module,
                    last,
                    nn.Parameter(torch.empty_like(value))
                    if isinstance(held, nn.Parameter)
                    else torch.empty_like(value),
                )
        network.load_state_dict(dict(weights), strict=True)
        example = torch.from_numpy(np.zeros((1, *spec.input.shape), spec.input.dtype))
        with torch.no_grad():
            network(example)
    except (AttributeError, RuntimeError) as error:
        raise SchemaError(
            f"the pruned weights do not fit the network {spec.name!r}: {error} {_FIX}"
        ) from error
    return network


def weights_content(weights: Mapping[str, Tensor]) -> bytes:
    """The bytes of `weights.safetensors`."""
    return safetensors.torch.save(
        {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    )


def save_pruned(
    folder: Path, card: PrunedCard, weights: Mapping[str, Tensor], score: OutlierScore
) -> None:
    """Write `folder` as a whole."""
    with files.new_directory(folder) as partial:
        files.write_bytes(partial / _WEIGHTS, weights_content(weights))
        save_outlier_score(partial / _SCORE, score)
        files.write_json(partial / "model.json", card.model_dump(mode="json"))


def read_pruned(folder: Path, checkpoint_sha256: str) -> PrunedCard | None:
    """What is in `folder`; None where pruning was not asked for. SchemaError unless it was made of the checkpoint of that digest."""
    path = folder / "model.json"
    try:
        content: Any = json.loads(path.read_bytes())
        if content == {"format_version": 1, "kind": None}:
            return None
        card = PrunedCard.model_validate(content)
    except (FileNotFoundError, NotADirectoryError):
        raise SchemaError(f"{path} is missing. {_FIX}") from None
    except ValueError as error:  # pydantic's and json's are both ValueErrors
        raise SchemaError(f"{path} is not what the prune stage writes: {error}. {_FIX}") from error
    if card.pruned_from != checkpoint_sha256:
        raise SchemaError(
            f"{folder} was pruned from weights {card.pruned_from[:12]}, the checkpoint has {checkpoint_sha256[:12]}. {_FIX}"
        )
    return card


def load_pruned(folder: Path, card: PrunedCard) -> CalibratedNetwork:
    """The pruned network as it answers, on the CPU. SchemaError if a file is missing or does not fit, IntegrityError if one was altered."""
    path = folder / _WEIGHTS
    try:
        weights = safetensors.torch.load(files.read_verified(path, card.weights_sha256))
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. {_FIX}") from None
    except (IntegrityError, SafetensorError) as error:
        raise IntegrityError(f"{error} {_FIX}") from None
    return calibrated(network_of(card.network, weights), card.calibration, folder / _SCORE)
