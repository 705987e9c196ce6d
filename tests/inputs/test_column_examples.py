"""The descriptions of a table's columns, with examples, that callers receive."""

from typing import Any

import pytest

from slipway.inputs.columns import Column, ColumnContract, read_row


def contract(**facts: Any) -> ColumnContract:
    usual: dict[str, Any] = {
        "required": False,
        "min": None,
        "max": None,
        "has_missing": False,
        "categories": [],
        "mean": 0.0,
        "std": 1.0,
        "fill": 0.0,
    }
    return ColumnContract(
        kind="columns",
        columns=[Column.model_validate(usual | {"name": "c", "quantiles": []} | facts)],
    )


@pytest.mark.parametrize(
    ("fill", "bounds", "shown"),
    [
        (0.048799999999999996, {}, 0.0488),
        (1065.0, {}, 1065),
        (0.30000004, {"min": 0.30000001}, 0.30000004),
        (1.7976931348623157e308, {}, 1.79769e308),
    ],
)
def test_example_numbers_have_few_digits_and_stay_within_bounds(
    fill: float, bounds: dict[str, float], shown: float
) -> None:
    wanted = contract(kind="number", fill=fill, **bounds)
    assert wanted.example_row() == {"c": shown}
    assert read_row(wanted.example_row(), wanted)
