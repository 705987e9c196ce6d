from typing import Any

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
    assert not has_ended(_history(3.0, 2.0, 2.5), 4, 2)
    assert has_ended(_history(3.0, 2.0, 2.5, 1.0), 4, 2)
    assert has_ended(_history(2.0, 2.0, 2.5), 4, 2)
    assert not has_ended(_history(2.0, 2.0, 2.5), 4, None)


@pytest.mark.parametrize(
    ("settings", "num_val", "expected"),
    [
        ({"epochs": 40}, 50, 5),
        ({"epochs": 200}, 5_000, 20),
        ({"epochs": 40}, 49, None),
        ({"epochs": 40, "keep": "last"}, 5_000, None),
        ({"epochs": 2000, "network": "lightgbm"}, 50, 100),
        ({"early_stopping_patience": 3}, 10, 3),
        ({"early_stopping_patience": None}, 5_000, None),
    ],
)
def test_patience_follows_from_the_epochs_where_validation_rows_suffice(
    settings: dict[str, Any], num_val: int, expected: int | None
) -> None:
    update = {"early_stopping_patience": "auto", "keep": "best"} | settings
    assert PROJECT.train.model_copy(update=update).patience(num_val) == expected
