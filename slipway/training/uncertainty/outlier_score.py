"""The outlier score: how far a row's features are from those of the training rows, in their own deviations.

The Mahalanobis distance under a probabilistic principal component analysis (Tipping and Bishop 1999): a deviation of its own along
each of the widest directions, one in common for all others, so that few rows are enough for many features. Its square is divided
by the number of features and the root is taken: about 1 for an ordinary row. bench/results/outlier_scores.md compares scores.
"""

from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from slipway.artifacts.uncertainty import Outlier
from slipway.system import files
from slipway.system.errors import IntegrityError, SchemaError

_MOST_DIRECTIONS = 64
_FURTHEST = 1e6  # a feature beyond counts as there: squares have to stay finite, and the service answers no infinity
_LEAST_SHARE = 1e-4  # of the mean square: what varies less is rounding, which is relative to a feature, and by which runtimes differ
_FIX = "Run `dvc repro evaluate`."
_NAMES = ("centre", "directions", "inverse_deviations", "inverse_rest")


class OutlierScore(nn.Module):
    """(rows, D) features of the layer `layer` to (rows,) float32 scores, 0 or more."""

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
        """(B, D) -> (B,)"""
        offset = (features - self.centre).clamp(-_FURTHEST, _FURTHEST)
        along = offset @ self.directions  # (B, R)
        rest = offset - along @ self.directions.T
        # Each step is a call of the runtime's for every batch, so what is constant is put together, and no power is asked for.
        scale = features.shape[1] ** -0.5
        along = along * (self.inverse_deviations * scale)
        squares = (along * along).sum(dim=1) + (rest * rest).sum(dim=1) * (
            self.inverse_rest * scale
        ).square()
        score: Tensor = squares.sqrt()
        return score


def fit_outlier_score(layer: str, features: NDArray[np.float32]) -> OutlierScore:
    """From (N, D) features of training rows."""
    rows = features.astype(np.float64)
    centre = rows.mean(axis=0)
    variances, directions = np.linalg.eigh(
        np.cov(rows, rowvar=False, bias=True).reshape(rows.shape[1], -1)
    )  # ascending
    num_kept = min(_MOST_DIRECTIONS, len(variances))
    least = max(float((rows * rows).mean()) * _LEAST_SHARE, 1e-12)
    kept, rest = variances[::-1][:num_kept], variances[::-1][num_kept:]
    deviations = np.sqrt(np.maximum(kept, least))
    common = float(np.sqrt(max(rest.mean(), least))) if len(rest) else 1.0
    statistics = {
        "centre": centre,
        "directions": np.ascontiguousarray(directions[:, ::-1][:, :num_kept]),
        "inverse_deviations": 1 / deviations,
        "inverse_rest": np.array(1 / common if len(rest) else 0.0),
    }
    return OutlierScore(
        layer,
        {name: torch.from_numpy(values).to(torch.float32) for name, values in statistics.items()},
    )


def save_outlier_score(path: Path, score: OutlierScore) -> None:
    """Write `artifacts/outlier_score.safetensors`."""
    files.write_bytes(path, _content(score))


def digest(score: OutlierScore) -> str:
    """Hex SHA-256 of the file that `save_outlier_score` writes."""
    return files.sha256_bytes(_content(score))


def load_outlier_score(path: Path, fitted: Outlier) -> OutlierScore:
    """The score as it was fitted. SchemaError if the file is missing or of another form, IntegrityError if it was altered."""
    try:
        payload = files.read_verified(path, fitted.statistics_sha256)
    except FileNotFoundError:
        raise SchemaError(f"{path} is missing. {_FIX}") from None
    except IntegrityError as error:
        raise IntegrityError(f"{error} {_FIX}") from None
    try:
        return OutlierScore(fitted.layer, safetensors.torch.load(payload))
    except (KeyError, SafetensorError) as error:
        raise SchemaError(
            f"{path} is not what the evaluate stage writes: {error!r}. {_FIX}"
        ) from error


def _content(score: OutlierScore) -> bytes:
    return safetensors.torch.save(
        {name: getattr(score, name).cpu().contiguous() for name in _NAMES}
    )
