"""Runs one slice of the nightly tier, as a plugin: `pytest -p tests.nightly_slice -m nightly`.

The commit's hash orders the test files, and the tests within each. Tests are taken in this order
while their declared seconds fit into `PLANNED_S`, so the same commit always chooses the same tests
and other commits choose others. On a slow machine, tests beyond `LIMIT_S` are skipped.
"""

import hashlib
import subprocess
import time
from collections.abc import Generator, Mapping

import pytest

PLANNED_S = 170.0  # besides 30 s that collecting takes
LIMIT_S = 240.0
UNDECLARED_S = 20.0
_OVER = "the time of this slice is over"


def choose(seconds: Mapping[str, float], key: str, planned_s: float) -> list[str]:
    """Return the names of the tests in this slice, in the order to run them."""

    def digest(text: str) -> str:
        return hashlib.sha256(f"{key} {text}".encode()).hexdigest()

    chosen, left_s = [], planned_s
    for name in sorted(seconds, key=lambda name: (digest(name.split("::")[0]), digest(name))):
        if seconds[name] <= left_s:
            chosen.append(name)
            left_s -= seconds[name]
    return chosen


def declared_seconds(item: pytest.Item) -> float:
    """Return the duration that the test's marker declares."""
    marker = item.get_closest_marker("nightly")
    return float(marker.kwargs.get("seconds", UNDECLARED_S)) if marker else UNDECLARED_S


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the key of the slice; CI uses the commit."""
    parser.addoption("--slice-key", metavar="KEY", help="chooses the slice; default: the commit")


class _Slice:
    """The chosen tests and their deadline."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.ends = time.monotonic() + LIMIT_S

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        by_name = {item.nodeid: item for item in items}
        seconds = {name: declared_seconds(item) for name, item in by_name.items()}
        chosen = choose(seconds, self.key, PLANNED_S)
        items[:] = [by_name.pop(name) for name in chosen]
        config.hook.pytest_deselected(items=list(by_name.values()))

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        total_s = sum(map(declared_seconds, items))
        head = f"slice of {self.key}: {len(items)} nightly tests, {total_s:g} s declared"
        return [head, *(f"  {item.nodeid}" for item in items)]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        left_s = self.ends - time.monotonic()
        if left_s < declared_seconds(item):
            item.add_marker(pytest.mark.skip(reason=_OVER))
        else:  # pytest-timeout ends it at the deadline
            item.add_marker(pytest.mark.timeout(left_s), append=False)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and "from pytest-timeout" in str(report.longrepr):
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {_OVER}")
        return report


def pytest_configure(config: pytest.Config) -> None:
    """Use the commit as the key if no other is given."""
    key = config.getoption("--slice-key")
    if key is None:
        command = ["git", "rev-parse", "HEAD"]
        key = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    config.pluginmanager.register(_Slice(key), "nightly-slice")
