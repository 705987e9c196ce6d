"""docs/operations.md speaks of what there is: settings, metrics, errors, files, commands."""

import importlib.util
import re

import pytest

from serving.responses import ERRORS
from serving.settings import PREFIX, Settings
from tests.launch.manifests import routes
from tests.monitoring.queries import ROOT, documented_metrics

PAGE = (ROOT / "docs/operations.md").read_text()
FOREIGN_SETTINGS = {"SLIPWAY_PORT"}  # which Kubernetes would set


def wrong_names(page: str) -> set[str]:
    """Settings, metrics, paths of the service, files and modules that a page names and that are not there."""
    found = {name for name in re.findall(r"\bSLIPWAY_[A-Z_]+[A-Z]", page) if name.removeprefix(PREFIX).lower() not in Settings.model_fields}
    found -= FOREIGN_SETTINGS
    found |= set(re.findall(r"`(slipway_\w+)`", page)) - documented_metrics()
    found |= {path for path in re.findall(r"`(/[a-z]+)`", page) if path not in {*routes(), "/tmp"}}
    found |= {path for path in re.findall(r"\b((?:launch|monitoring)/[\w./-]+\w)", page) if not (ROOT / path).exists()}
    found |= {module for module in re.findall(r"python -m ([\w.]+)", page) if not is_module(module)}
    return {name for name in found if not name.startswith("launch/secrets")}  # which the reader makes


def is_module(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and (not found.submodule_search_locations or importlib.util.find_spec(f"{name}.__main__") is not None)


def test_the_page_names_only_what_there_is() -> None:
    assert wrong_names(PAGE) == set()


@pytest.mark.parametrize(
    "name",
    ["`SLIPWAY_DRAIN`", "`slipway_redy`", "`/ready`", "`launch/kubernetes/cpu`", "`python -m serving.rolout`", "`python -m slipway.data`"],
)
def test_a_wrong_name_would_be_seen(name: str) -> None:
    assert wrong_names(PAGE + name) - wrong_names(PAGE)


def test_the_errors_of_the_runbook_are_the_services() -> None:
    section = PAGE.split("### SlipwayUnavailableFast")[1].split("###")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) <= set(ERRORS)
    assert "queue_full" in section
