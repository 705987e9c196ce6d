"""What all tests share: temporary files inside the checkout, the real params to change, the project's root."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiers import settle_tiers

ROOT = Path(__file__).parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary folders inside the checkout, and not in a hidden folder, where `bentoml build` refuses to read."""
    if config.option.basetemp is None:
        (ROOT / "tmp").mkdir(exist_ok=True)
        config.option.basetemp = str(ROOT / "tmp" / "pytest")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its tier before `-m` selects by it."""
    settle_tiers(items)


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
    content: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    return content
