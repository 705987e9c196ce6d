"""A certified bundle on disk, and a model worker that serves it in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slipway.serving.monitoring import aggregator, monitor
from slipway.serving.rollout import commands
from slipway.serving.settings import Settings
from tests.serving.bundles import certify, row_classifier, write_bundle
from tests.serving.in_process import read_all_settings
from tests.serving.monitoring.monitored import monitored_bundle
from tests.serving.rolling import scaled_classifier, write_candidate

MakeSettings = Callable[..., Settings]


@pytest.fixture
def certified(tmp_path: Path) -> Path:
    """Return a folder with a certified `bundle` and its `certificate.json`."""
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    return tmp_path


@pytest.fixture
def certified_table(certified: Path) -> Path:
    """Return the folder of `certified`, with a bundle for table rows."""
    certify(certified / "certificate.json", write_bundle(certified / "bundle", row_classifier()))
    return certified


@pytest.fixture
def make_settings(certified: Path) -> MakeSettings:
    """Return a function that makes settings for the certified bundle.

    Its keyword arguments are further SLIPWAY_ variables.
    """

    def make(**variables: object) -> Settings:
        names = {
            "bundle": "bundle",
            "certificate": "certificate.json",
            "engine": "engine",
            "state": "state",
        }
        paths = {name: certified / file for name, file in names.items()}
        return read_all_settings(
            {f"SLIPWAY_{name.upper()}": str(value) for name, value in (paths | variables).items()}
        )

    return make


@pytest.fixture
def new_bundle(certified: Path) -> Path:
    """The bundle of a candidate whose probabilities differ from those of the model in use."""
    return write_candidate(certified / "new", scaled_classifier(2))


@pytest.fixture
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the rehearsal of candidates, which takes seconds and has its own tests."""
    monkeypatch.setattr(commands, "rehearse", lambda settings: None)


@pytest.fixture
def quick_monitoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make monitoring run every round, merge and refresh at once, without a limit on CPU time."""
    for name, seconds in (
        ("GATHER_S", 0.02),
        ("MERGE_S", 0.04),
        ("REFRESH_S", 0.04),
        ("TIDY_S", 0.1),
    ):
        monkeypatch.setattr(monitor, name, seconds)
    for name in ("FEATURES_BUDGET", "RECORDS_BUDGET"):
        monkeypatch.setattr(aggregator, name, 10.0)


@pytest.fixture
def make_monitored(certified: Path, make_settings: MakeSettings) -> MakeSettings:
    """Return a function that makes settings for a bundle with a drift reference."""
    monitored_bundle(certified)
    return make_settings
