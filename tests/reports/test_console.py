"""Text for a terminal."""

import pytest

from slipway.reports.console import number, size, text_table


def test_text_table_aligns_columns_and_right_aligns_numbers() -> None:
    table = text_table(["name", "value"], [["a", "1.5"], ["longer", "10.25"], ["none", ""]], "  ")
    assert table.splitlines() == ["  name    value", "  a         1.5", "  longer  10.25", "  none"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1.0000"),
        (0.987654, "0.9877"),
        (12.3456, "12.35"),
        (1e-7, "1e-07"),
        (-0.25, "-0.2500"),
        (0.99999, "1.0000"),
        (-46238.7, "-46,240"),
        (9999.9, "10,000"),
        (2.1379e9, "2,138,000,000"),
        (1e13, "1e+13"),
    ],
)
def test_number_writes_four_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.2 kB"), (44_800_000, "44.8 MB"), (10**13, "10.0 TB")],
)
def test_size_writes_one_decimal(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
