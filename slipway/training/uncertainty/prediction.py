"""What a trained network answers, row by row, in one process: no sampler pads, so every row is counted exactly once.

An answer that is not finite is refused.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from slipway.data.store.packed import Inputs
from slipway.kinds.registry import is_classification
from slipway.metrics.uncertainty import softmax
from slipway.system.errors import TrainingError
from slipway.training.networks.features import answer_and_features
from slipway.training.networks.networks import Network


class RawAnswers(NamedTuple):
    """What a network answers before it is calibrated."""

    answers: NDArray[np.float32]  # (N, K) logits, or (N, 1) values
    features: NDArray[np.float32]  # (N, D) what the asked layer took, or (N,) the scores of it


def default_device() -> str:
    """ "cuda" where torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def predict(network: Network, inputs: Inputs, batch_size: int, device: str) -> NDArray[np.float32]:
    """(N, ...) rows as the network takes them -> (N, K) float32 probabilities, or (N, 1) values for a numeric target.

    In float32 without TF32, the softmax in float64. Moves `network` to `device` and into evaluation mode.
    Raises TrainingError if any answer is NaN or infinite.
    """
    answers = predict_raw(network, None, inputs, batch_size, device).answers
    return softmax(answers).astype(np.float32) if is_classification(network.spec.task) else answers


def predict_raw(
    network: Network,
    layer: str | None,
    inputs: Inputs,
    batch_size: int,
    device: str,
    score: nn.Module | None = None,
) -> RawAnswers:
    """The same before the softmax, with the features that `layer` takes; none where it is None.

    With a `score` its numbers are kept instead of the features, which of many rows take much memory.
    """
    network.eval().to(device)
    with (
        torch.inference_mode(),
        torch.backends.cudnn.flags(
            enabled=True, benchmark=False, deterministic=True, allow_tf32=False
        ),
    ):
        starts = range(0, len(inputs), batch_size)
        made = (score or nn.Identity()).to(device)
        parts = [
            _answer(network, layer, made, inputs[start : start + batch_size], device)
            for start in starts
        ]
    answers, features = (np.concatenate(part) for part in zip(*parts, strict=True))
    wrong = ~np.isfinite(answers).all(axis=1)
    if wrong.any():
        raise TrainingError(
            f"the network answers NaN or infinity for {wrong.sum()} of {len(answers)} rows, the first is row {int(wrong.argmax())}. "
            "Its training diverged: lower train.learning_rate, then run `dvc repro`."
        )
    return RawAnswers(answers, features)


def _answer(
    network: Network, layer: str | None, made: nn.Module, rows: NDArray[Any], device: str
) -> RawAnswers:
    """(B, ...) -> (B, K), (B, D); the copy is because torch takes no read-only memory map."""
    taken = torch.from_numpy(np.array(rows)).to(device)
    answer, features = (
        (network(taken), torch.empty(len(taken), 0))
        if layer is None
        else answer_and_features(network, layer, taken)
    )
    return RawAnswers(answer.float().cpu().numpy(), made(features).cpu().numpy())
