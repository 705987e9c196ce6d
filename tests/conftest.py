"""Shared by all tests: temporary folders inside the checkout, test tiers and common fixtures."""

import functools
import gc
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from tests.tiers import settle_tiers

ROOT = Path(__file__).parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Put temporary folders into the checkout's tmp/. `bentoml build` refuses hidden folders."""
    if config.option.basetemp is None:
        (ROOT / "tmp").mkdir(exist_ok=True)
        config.option.basetemp = str(ROOT / "tmp" / "pytest")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier before `-m` selects by it."""
    settle_tiers(items)


def pytest_collection_finish() -> None:
    """Spare what was imported from each later search for garbage, and search rarely.

    Otherwise the searches take a tenth of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# Word in the source of the files of a room that share its setup.
_SHARED = {"tests/end_to_end": "finished", "tests/export": ": Project"}
_READ_ALL_CODE = (
    *("tests/structure/", "tests/test_faq.py"),
    *("tests/kinds/test_code_digest.py", "tests/config/test_seals.py"),
)


class SharedFixtureScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """`--dist loadfile`, with the files that share a costly setup in one process.

    Otherwise each process would run the whole pipeline, export the same models and parse all code
    for itself.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = super()._split_scope(nodeid)
        if path.startswith(_READ_ALL_CODE):
            return "tests/structure"
        sharing = (room for room, fixture in _SHARED.items() if fixture in _source(path))
        return next((room for room in sharing if path.startswith(f"{room}/")), path)


@functools.cache
def _source(path: str) -> str:
    return (ROOT / path).read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    is_by_file = config.getvalue("dist") == "loadfile"
    return SharedFixtureScheduling(config, log) if is_by_file else None


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def is_nightly(request: pytest.FixtureRequest) -> bool:
    """True in a nightly test, which may assert times as well."""
    return request.node.get_closest_marker("nightly") is not None


@pytest.fixture
def params_content() -> dict[str, Any]:
    """The content of the real params.yaml, free to change."""
    from tests.project_params import own_content  # only here, because xdist's own process is light

    return own_content()
