"""When a training has ended: after its last epoch, or early, where the validation loss no longer falls.

A function of the metrics so far, which every save holds, so there is no other state to resume.
"""

from collections.abc import Mapping, Sequence

from slipway.config.sections import TrainParams


def has_ended(history: Sequence[Mapping[str, float]], params: TrainParams) -> bool:
    """Whether no epoch follows those of `history`."""
    return len(history) >= params.epochs or stops_early(history, params.early_stopping_patience)


def stops_early(history: Sequence[Mapping[str, float]], patience: int | None) -> bool:
    """Whether the lowest validation loss is `patience` epochs old."""
    if patience is None or not history:
        return False
    losses = [metrics["val/loss"] for metrics in history]
    return len(losses) - 1 - losses.index(min(losses)) >= patience
