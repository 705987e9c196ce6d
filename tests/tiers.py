"""Test tiers: each test belongs to exactly one of unit, process and nightly.

A marker in the test names its tier; a test without one is a unit test. The marker nearest to the
case decides: `pytest.param(..., marks=pytest.mark.nightly)` before the function's marker, that
before the marker of its class, that before the module's `pytestmark`.
"""

from collections.abc import Iterable, Iterator

import pytest
from _pytest.mark import Mark

TIERS = ("unit", "process", "nightly")


def settle_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark each test with its own tier only, so that `-m process` selects no nightly case."""
    tiers = {item: tier_of(item) for item in items}
    for item, tier in tiers.items():
        if tier.name == "unit" and item.get_closest_marker("gpu"):
            raise pytest.UsageError(
                f"{item.nodeid}: a gpu test needs `process` or `nightly` as well"
            )
    for item in tiers:
        for node in item.listchain():
            node.own_markers[:] = [mark for mark in node.own_markers if mark.name not in TIERS]
    for item, mark in tiers.items():
        item.add_marker(getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs))


def tier_of(item: pytest.Item) -> Mark:
    """Return the tier marker nearest to the test, `unit` without any."""
    for marks in _levels(item):
        found = [mark for mark in marks if mark.name in TIERS]
        if len({mark.name for mark in found}) > 1:
            named = " and ".join(sorted({mark.name for mark in found}))
            raise pytest.UsageError(f"{item.nodeid}: two tiers at one place, {named}: keep one")
        if found:
            return found[0]
    return pytest.mark.unit.mark


def _levels(item: pytest.Item) -> Iterator[list[Mark]]:
    """Yield the markers of the case, its function, its class and its module, nearest first."""
    callspec = getattr(item, "callspec", None)
    of_case = list(callspec.marks) if callspec else []
    yield of_case
    yield [mark for mark in item.own_markers if mark not in of_case]
    for node in reversed(item.listchain()[:-1]):
        yield node.own_markers
