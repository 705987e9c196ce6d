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
    ("quantiles", "fill", "has_times", "shown"),
    [
        ([19723.25, 20088.0], 19800.5, True, "2024-03-18T12:00:00"),
        ([19723.0, 20088.75], 19800.0, True, "2024-03-18T00:00:00"),
        ([19723.0, 19800.4, 20088.0], 19800.5, False, "2024-03-18"),
        ([], 19800.0, False, "2024-03-18"),
    ],
)
def test_date_columns_with_times_of_day_say_so_and_have_a_time_in_their_example(
    quantiles: list[float], fill: float, has_times: bool, shown: str
) -> None:
    wanted = contract(kind="date", quantiles=quantiles, fill=fill)
    (described,) = wanted.describe()["columns"]
    assert described["has_times"] is has_times
    assert wanted.example_row() == {"c": shown}
    assert read_row({"c": shown}, wanted) == {"c": round(fill, 1) if has_times else 19800.0}


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
