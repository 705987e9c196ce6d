"""Predicts all rows of a split with a trained network, in one process.

A non-finite prediction raises TrainingError.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from slipway.artifacts.uncertainty import Answers
from slipway.data.store.packed import Inputs
from slipway.kinds.registry import kind_of
from slipway.system.errors import TrainingError
from slipway.training.networks.features import answer_and_features
from slipway.training.networks.networks import Network


def default_device() -> str:
    """Return the device for predictions: "cuda" if torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def predict(network: Network, inputs: Inputs, batch_size: int, device: str) -> NDArray[np.float32]:
    """Map rows (N, ...) to probabilities (N, K) float32, or values (N, 1) of a numeric target.

    Computes in float32 without TF32, the softmax in float64. Moves `network` to `device` and into
    evaluation mode. Raises TrainingError if any prediction is NaN or infinite.
    """
    answers = predict_raw(network, None, inputs, batch_size, device).outputs
    uncertainty = kind_of(network.spec.task).target.load_part("uncertainty")
    return cast(NDArray[np.float32], uncertainty.answers(answers, 1.0))


def predict_logits(
    network: Network, inputs: Inputs, batch_size: int, device: str
) -> NDArray[np.float32]:
    """Map rows (N, ...) to logits (N, K) float32, or values (N, 1), as `predict` does."""
    return predict_raw(network, None, inputs, batch_size, device).outputs


def predict_raw(
    network: Network,
    layer: str | None,
    inputs: Inputs,
    batch_size: int,
    device: str,
    score: nn.Module | None = None,
) -> Answers:
    """Return logits (N, K) or values (N, 1), and the OOD scores (N,).

    Without a `score`, returns the features (N, D), which are the inputs of `layer`, instead.
    """
    network.eval().to(device)
    score = (score or nn.Identity()).to(device)
    exact_convolutions = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=False
    )
    with torch.inference_mode(), exact_convolutions:
        parts = [
            _predict_batch(network, layer, score, inputs[start : start + batch_size], device)
            for start in range(0, len(inputs), batch_size)
        ]
    answers, features = (np.concatenate(part) for part in zip(*parts, strict=True))
    wrong = ~np.isfinite(answers).all(axis=1)
    if wrong.any():
        raise TrainingError(
            f"the network predicts NaN or infinity for {wrong.sum()} of {len(answers)} rows, the "
            f"first is row {int(wrong.argmax())}. Its training diverged: lower "
            "train.learning_rate, then run `slipway run`."
        )
    return Answers(answers, features)


def _predict_batch(
    network: Network, layer: str | None, score: nn.Module, rows: NDArray[Any], device: str
) -> Answers:
    """Return outputs (B, K) for rows (B, ...), with OOD scores (B,) or features (B, D)."""
    inputs = torch.from_numpy(np.array(rows)).to(device)  # torch takes no read-only memory map
    if layer is None:
        answer, features = network(inputs), torch.empty(len(inputs), 0)
    else:
        answer, features = answer_and_features(network, layer, inputs)
    return Answers(answer.float().cpu().numpy(), score(features).cpu().numpy())
