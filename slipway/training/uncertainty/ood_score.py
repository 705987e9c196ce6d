"""OOD score: distance of a row's features from those of the training rows, in standard deviations.

The Mahalanobis distance under a probabilistic principal component analysis (Tipping and Bishop
1999): each of the widest directions has its own deviation, all others share one, so that few rows
suffice for many features. The score is the root of the squared distance divided by the number of
features: about 1 for an ordinary row. bench/results/ood_scores.md compares scores.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from slipway.artifacts.uncertainty import OODThreshold
from slipway.system import files
from slipway.system.errors import SchemaError
from slipway.training.networks.networks import load_tensors, serialize_tensors

_MAX_DIRECTIONS = 64
_MAX_OFFSET = 1e6  # larger features are clipped, so that squares stay finite
# Lower bound of a variance, as a fraction of the mean square. Smaller ones are rounding, which is
# relative to a feature and differs between runtimes.
_MIN_VARIANCE = 1e-4
_FIX = "Run `dvc repro evaluate`."
_NAMES = ("centre", "directions", "inverse_deviations", "inverse_rest")


class OODScore(nn.Module):
    """Maps features (rows, D) of layer `layer` to OOD scores (rows,) float32, 0 or more."""

    centre: Tensor  # (D,)
    directions: Tensor  # (D, R) orthonormal columns
    inverse_deviations: Tensor  # (R,)
    inverse_rest: Tensor  # ()

    def __init__(self, layer: str, statistics: dict[str, Tensor]) -> None:
        super().__init__()
        self.layer = layer
        for name in _NAMES:
            self.register_buffer(name, statistics[name], persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, D) to scores (B,)."""
        offset = (features - self.centre).clamp(-_MAX_OFFSET, _MAX_OFFSET)
        along = offset @ self.directions  # (B, R)
        rest = offset - along @ self.directions.T
        # Each operation is one call of the runtime per batch, so constants are combined.
        scale = features.shape[1] ** -0.5
        along = along * (self.inverse_deviations * scale)
        squares = (along * along).sum(dim=1) + (rest * rest).sum(dim=1) * (
            self.inverse_rest * scale
        ).square()
        score: Tensor = squares.sqrt()
        return score


def fit_ood_score(layer: str, features: NDArray[np.float32]) -> OODScore:
    """Fit the OOD score to the features (N, D) of training rows."""
    rows = features.astype(np.float64)
    centre = rows.mean(axis=0)
    covariance = np.cov(rows, rowvar=False, bias=True).reshape(rows.shape[1], -1)
    variances, directions = np.linalg.eigh(covariance)  # ascending
    num_kept = min(_MAX_DIRECTIONS, len(variances))
    least = max(float((rows * rows).mean()) * _MIN_VARIANCE, 1e-12)
    kept, rest = variances[::-1][:num_kept], variances[::-1][num_kept:]
    deviations = np.sqrt(np.maximum(kept, least))
    common = float(np.sqrt(max(rest.mean(), least))) if len(rest) else 1.0
    statistics = {
        "centre": centre,
        "directions": np.ascontiguousarray(directions[:, ::-1][:, :num_kept]),
        "inverse_deviations": 1 / deviations,
        "inverse_rest": np.array(1 / common if len(rest) else 0.0),
    }
    return OODScore(
        layer,
        {name: torch.from_numpy(values).to(torch.float32) for name, values in statistics.items()},
    )


def serialize_ood_score(score: OODScore) -> bytes:
    """Return the bytes of the file that stores an OOD score."""
    return serialize_tensors({name: getattr(score, name) for name in _NAMES})


def save_ood_score(path: Path, score: OODScore) -> None:
    files.write_bytes(path, serialize_ood_score(score))


def load_ood_score(path: Path, fitted: OODThreshold) -> OODScore:
    """Load the OOD score that a calibration fitted.

    Raises SchemaError if the file is missing or has another format, IntegrityError if it was
    altered.
    """
    statistics = load_tensors(path, fitted.statistics_sha256, _FIX)
    try:
        return OODScore(fitted.layer, statistics)
    except KeyError as error:
        raise SchemaError(
            f"{path} is not what the evaluate stage writes: {error!r}. {_FIX}"
        ) from error
