import pytest

from slipway.training.checkpoints.callback import has_ended, stops_early
from tests.project_params import PROJECT


def _history(*losses: float) -> list[dict[str, float]]:
    return [{"val/loss": loss} for loss in losses]


@pytest.mark.parametrize(
    ("losses", "stops"),
    [
        ((), False),
        ((3.0,), False),
        ((3.0, 2.0, 2.5), False),
        ((3.0, 2.0, 2.5, 2.1), True),
        ((3.0, 2.0, 2.0, 2.0), True),
        ((2.0, 3.0, 1.0), False),
    ],
)
def test_a_training_stops_early_when_its_lowest_loss_is_patience_epochs_old(
    losses: tuple[float, ...], stops: bool
) -> None:
    assert stops_early(_history(*losses), 2) is stops


def test_training_without_patience_never_stops_early() -> None:
    assert not stops_early(_history(1.0, *[2.0] * 100), None)


def test_a_training_has_ended_if_it_stopped_early_or_reached_its_last_epoch() -> None:
    params = PROJECT.train.model_copy(update={"epochs": 4, "early_stopping_patience": 2})
    assert not has_ended(_history(3.0, 2.0, 2.5), params)
    assert has_ended(_history(3.0, 2.0, 2.5, 1.0), params)
    assert has_ended(_history(2.0, 2.0, 2.5), params)
