"""The test tiers (tests/tiers.py), and the part of nightly that CI runs (nightly_slice.py)."""

from collections import Counter

import pytest

from tests.nightly_slice import choose
from tests.tiers import TIERS

pytest_plugins = ["pytester"]
CONFTEST = """
from tests.tiers import settle_tiers
def pytest_collection_modifyitems(items):
    settle_tiers(items)
"""
CASES = """
import pytest
pytestmark = pytest.mark.process

def test_of_the_module(): ...

@pytest.mark.unit
def test_of_the_function(): ...

@pytest.mark.process
@pytest.mark.parametrize("case", ["here", pytest.param("there", marks=pytest.mark.nightly)])
def test_of_the_case(case): ...
"""


@pytest.fixture
def project(
    pytester: pytest.Pytester, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    """A folder whose tests get tiers as ours do, without the plugins that load slowly."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    lines = "".join(f"  {line}\n" for line in request.config.getini("markers"))
    pytester.makeini(
        f"[pytest]\naddopts = --strict-markers -p no:cacheprovider\nmarkers =\n{lines}"
    )
    pytester.makeconftest(CONFTEST)
    return pytester


def selected(project: pytest.Pytester, tier: str) -> list[str]:
    """Return the tests that `-m` selects."""
    printed = project.runpytest_inprocess("-q", "--collect-only", "-m", tier).stdout
    return [line.split("::")[1] for line in printed.str().splitlines() if "::" in line]


def test_each_test_of_this_run_has_exactly_one_tier(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert len([mark for mark in item.iter_markers() if mark.name in TIERS]) == 1, item.nodeid


def test_the_marker_nearest_to_the_case_decides(project: pytest.Pytester) -> None:
    project.makepyfile(CASES)
    assert selected(project, "unit") == ["test_of_the_function"]
    assert selected(project, "process") == ["test_of_the_module", "test_of_the_case[here]"]
    assert selected(project, "nightly") == ["test_of_the_case[there]"]


def test_a_test_without_a_marker_is_a_unit_test(project: pytest.Pytester) -> None:
    project.makepyfile("def test_it(): ...")
    assert selected(project, "unit") == ["test_it"]


@pytest.mark.parametrize(
    ("markers", "says"),
    [
        (("process", "nightly"), "two tiers at one place, nightly and process"),
        (("gpu",), "a gpu test needs `process` or `nightly` as well"),
        (("slow",), "'slow' not found in `markers` configuration option"),
        (("exhaustive",), "'exhaustive' not found in `markers` configuration option"),
    ],
)
def test_two_tiers_a_gpu_test_of_no_tier_and_unknown_markers_are_refused(
    project: pytest.Pytester, markers: tuple[str, ...], says: str
) -> None:
    marks = "".join(f"@pytest.mark.{marker}\n" for marker in markers)
    project.makepyfile(f"import pytest\n{marks}def test_it(): ...")
    result = project.runpytest_inprocess("-q")
    assert result.ret != pytest.ExitCode.OK
    assert says in result.stdout.str() + result.stderr.str()


SECONDS = {f"test_{file}.py::test_{number}": 20.0 for file in range(30) for number in range(5)}


def test_a_slice_is_the_same_for_the_same_commit_and_fits_its_time() -> None:
    for key in ("a", "b"):
        chosen = choose(SECONDS, key, 170)
        assert chosen == choose(dict(reversed(SECONDS.items())), key, 170)
        assert len(chosen) == 8


def test_a_test_longer_than_what_is_left_makes_room_for_shorter_ones() -> None:
    assert choose({"long": 100.0, "short": 20.0}, "a", 30) == ["short"]


def test_every_test_is_in_some_slice() -> None:
    counts = Counter(name for key in range(200) for name in choose(SECONDS, str(key), 170))
    assert counts.keys() == SECONDS.keys()


SLICE = """
import time, pytest
@pytest.mark.nightly(seconds=1)
def test_good(): ...
@pytest.mark.nightly(seconds=1)
def test_bad(): assert {bad} == 0
@pytest.mark.nightly(seconds=1)
def test_endless(): time.sleep({sleeps})
"""


@pytest.mark.process
@pytest.mark.parametrize(("bad", "sleeps", "passed"), [(0, 0, 3), (0, 60, 2), (1, 0, 2)])
def test_a_slice_fails_by_a_failing_test_and_not_by_the_end_of_its_time(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, bad: int, sleeps: int, passed: int
) -> None:
    monkeypatch.setattr("tests.nightly_slice.LIMIT_S", 3.0)
    project.makepyfile(SLICE.format(bad=bad, sleeps=sleeps))
    arguments = (
        "-p",
        "tests.nightly_slice",
        "--slice-key",
        "end last",
        "-m",
        "nightly",
        "-rs",
        "-p",
        "pytest_timeout",
    )
    result = project.runpytest_inprocess(*arguments)
    outcomes = result.parseoutcomes()
    assert outcomes.get("failed", 0) == bad
    assert result.ret == bad
    result.stdout.fnmatch_lines(["slice of end last: 3 nightly tests, 3 s declared", "  *::test_*"])
    if sleeps:
        assert outcomes["skipped"] >= 1
        result.stdout.fnmatch_lines(["*the time of this slice is over"])
    else:
        assert outcomes["passed"] == passed
