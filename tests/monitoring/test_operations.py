"""docs/operations.md speaks of what there is: settings, metrics, errors, files, commands."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from serving.http.responses import ERRORS
from serving.settings import EXTENSION_VARIABLES, PREFIX, Settings
from tests.launch.manifests import COMPOSE, routes
from tests.monitoring.queries import ROOT, RULES, alerts, documented_metrics
from tests.monitoring.test_rules import needs_promtool, promtool

PAGE = (ROOT / "docs/operations.md").read_text()
FOREIGN_SETTINGS = {"SLIPWAY_PORT"}  # which Kubernetes would set


def wrong_names(page: str) -> set[str]:
    """Settings, metrics, paths of the service, files and modules that a page names and that are not there."""
    known = {*Settings.model_fields, *EXTENSION_VARIABLES}
    found = {
        name
        for name in re.findall(r"\bSLIPWAY_[A-Z_]+[A-Z]", page)
        if name.removeprefix(PREFIX).lower() not in known
    }
    found -= FOREIGN_SETTINGS
    found |= set(re.findall(r"`(slipway_\w+)`", page)) - documented_metrics()
    found |= {path for path in re.findall(r"`(/[a-z]+)`", page) if path not in {*routes(), "/tmp"}}
    found |= {
        path
        for path in re.findall(r"\b((?:launch|monitoring)/[\w./-]+\w)", page)
        if not (ROOT / path).exists()
    }
    found |= {module for module in re.findall(r"python -m ([\w.]+)", page) if not is_module(module)}
    return {
        name for name in found if not name.startswith("launch/secrets")
    }  # which the reader makes


def is_module(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and (
        not found.submodule_search_locations
        or importlib.util.find_spec(f"{name}.__main__") is not None
    )


def block(name: str, page: str = PAGE) -> str:
    """The example of a file, which its first line names."""
    (found,) = re.findall(
        rf"^```yaml\n(# (?:\S+/)?{re.escape(name)}\b.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    return str(found)


def unrouted(alertmanager: str) -> set[str]:
    """Severities of alerts that no receiver of its own is told of."""
    content = yaml.safe_load(alertmanager)
    known = {receiver["name"] for receiver in content["receivers"]}
    assert content["route"]["receiver"] in known
    told = {
        match
        for route in content["route"]["routes"]
        if route["receiver"] in known
        for match in route["matchers"]
    }
    return {
        severity
        for severity in {rule["labels"]["severity"] for rule in alerts().values()}
        if f'severity="{severity}"' not in told
    }


@needs_promtool
def test_prometheus_takes_the_example_for_a_machine_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(block("prometheus.yml"))
    assert promtool("check", "config", "--syntax-only", path).returncode == 0
    content = yaml.safe_load(path.read_text())
    (job,) = content["scrape_configs"]
    assert job["job_name"].startswith("slipway")  # as the rules look for
    assert content["alerting"]["alertmanagers"]
    path.write_text(block("prometheus.yml").replace("rule_files", "rules"))
    assert promtool("check", "config", "--syntax-only", path).returncode != 0  # the twin


def test_the_example_for_alertmanager_tells_somebody_of_every_severity() -> None:
    assert unrouted(block("alertmanager.yml")) == set()
    assert unrouted(block("alertmanager.yml").replace('severity="page"', 'severity="pages"')) == {
        "page"
    }


def test_the_mounted_folder_is_the_compose_files_services() -> None:
    (name,) = yaml.safe_load(block("models.yaml"))["services"]
    assert name in COMPOSE["services"]


def test_a_rule_can_be_labelled_by_the_name_that_it_is_applied_under() -> None:
    named = set(re.findall(r"\bprometheusrule/(\S+)", PAGE))
    assert named == {
        f"slipway-{path.stem}" for path in RULES
    }  # as launch/kubernetes/rules.sh makes them


def test_the_page_names_only_what_there_is() -> None:
    assert wrong_names(PAGE) == set()


@pytest.mark.parametrize(
    "name",
    [
        "`SLIPWAY_DRAIN`",
        "`slipway_redy`",
        "`/ready`",
        "`launch/kubernetes/cpu`",
        "`python -m serving.rolout`",
        "`python -m slipway.data`",
    ],
)
def test_a_wrong_name_would_be_seen(name: str) -> None:
    assert wrong_names(PAGE + name) - wrong_names(PAGE)


def test_the_errors_of_the_runbook_are_the_services() -> None:
    section = PAGE.split("### SlipwayUnavailableFast")[1].split("###")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) <= set(ERRORS)
    assert "queue_full" in section
