"""What all tests share: temporary files inside the checkout, the real params to change, the project's root."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keep pytest's temporary folders in .work: nothing is written outside the checkout."""
    if config.option.basetemp is None:
        (ROOT / ".work").mkdir(exist_ok=True)
        config.option.basetemp = str(ROOT / ".work" / "pytest")


@pytest.fixture
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture
def params_content() -> dict[str, Any]:
    """The content of the real params.yaml, free to change."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    return content
