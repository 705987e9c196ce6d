"""What a trained network answers, row by row, in one process: no sampler pads, so every row is counted exactly once.

An answer that is not finite is refused.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipway.contract import is_classification
from slipway.data.packed import Inputs
from slipway.errors import TrainingError
from slipway.training.networks import Network


def default_device() -> str:
    """ "cuda" where torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def predict(network: Network, inputs: Inputs, batch_size: int, device: str) -> NDArray[np.float32]:
    """(N, ...) rows as the network takes them -> (N, K) float32 probabilities, or (N, 1) values for a numeric target.

    In float32 without TF32, the softmax in float64. Moves `network` to `device` and into evaluation mode.
    Raises TrainingError if any answer is NaN or infinite.
    """
    network.eval().to(device)
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        starts = range(0, len(inputs), batch_size)
        answers = np.concatenate([_answer(network, inputs[start : start + batch_size], device) for start in starts])
    wrong = ~np.isfinite(answers).all(axis=1)
    if wrong.any():
        raise TrainingError(
            f"the network answers NaN or infinity for {wrong.sum()} of {len(answers)} rows, the first is row {int(wrong.argmax())}. "
            "Its training diverged: lower train.learning_rate, then run `dvc repro`."
        )
    return answers


def _answer(network: Network, rows: NDArray[Any], device: str) -> NDArray[np.float32]:
    """(B, ...) -> (B, K); the copy is because torch takes no read-only memory map."""
    answer: torch.Tensor = network(torch.from_numpy(np.array(rows)).to(device))
    if is_classification(network.spec.task):
        answer = answer.double().softmax(dim=1)
    numbers: NDArray[np.float32] = answer.float().cpu().numpy()
    return numbers
