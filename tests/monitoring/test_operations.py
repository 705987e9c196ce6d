"""docs/how-to/operations.md names only existing settings, metrics, errors, files and commands."""

import re
from pathlib import Path

import pytest
import yaml

from slipway.serving.http.responses import ERRORS
from slipway.serving.settings import EXTENSION_VARIABLES, PREFIX, Settings
from tests.launch.manifests import COMPOSE, routes
from tests.monitoring.queries import (
    PROMETHEUS_OWN,
    ROOT,
    RULES,
    alerts,
    documented_metrics,
    metric_names,
)
from tests.monitoring.test_rules import needs_promtool, promtool
from tests.test_docs import is_module

PAGE = (ROOT / "docs/how-to/operations.md").read_text()
FOREIGN_SETTINGS = {"SLIPWAY_PORT"}  # set by Kubernetes
LONGEST_RUNBOOK = 7  # lines that are not empty, without the title
PARTS = ("Check", "Decide", "Act")
PLATFORMS = ("Server", "Compose", "Kubernetes")


def wrong_names(page: str) -> set[str]:
    """Settings, metrics, routes, files and modules that a page names but that do not exist."""
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
    }  # the reader creates them


def block(name: str, page: str = PAGE) -> str:
    """The example whose first line names the file."""
    (found,) = re.findall(
        rf"^```yaml\n(# (?:\S+/)?{re.escape(name)}\b.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    return str(found)


def unrouted(alertmanager: str) -> set[str]:
    """Severities of alerts that have no receiver."""
    content = yaml.safe_load(alertmanager)
    known = {receiver["name"] for receiver in content["receivers"]}
    assert content["route"]["receiver"] in known
    routed = {
        match
        for route in content["route"]["routes"]
        if route["receiver"] in known
        for match in route["matchers"]
    }
    return {
        severity
        for severity in {rule["labels"]["severity"] for rule in alerts().values()}
        if f'severity="{severity}"' not in routed
    }


@needs_promtool
def test_the_prometheus_example_for_a_separate_machine_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(block("prometheus.yml"))
    assert promtool("check", "config", "--syntax-only", path).returncode == 0
    content = yaml.safe_load(path.read_text())
    (job,) = content["scrape_configs"]
    assert job["job_name"].startswith("slipway")  # the prefix that the rules select
    assert content["alerting"]["alertmanagers"]
    path.write_text(block("prometheus.yml").replace("rule_files", "rules"))
    assert (
        promtool("check", "config", "--syntax-only", path).returncode != 0
    )  # an unknown key fails the check


def test_the_alertmanager_example_routes_every_severity_to_a_receiver() -> None:
    assert unrouted(block("alertmanager.yml")) == set()
    assert unrouted(block("alertmanager.yml").replace('severity="page"', 'severity="pages"')) == {
        "page"
    }


def test_the_compose_override_for_models_names_a_service_of_the_compose_file() -> None:
    (name,) = yaml.safe_load(block("models.yaml"))["services"]
    assert name in COMPOSE["services"]


def test_the_page_uses_the_object_names_that_rules_sh_generates() -> None:
    named = set(re.findall(r"\bprometheusrule/(\S+)", PAGE))
    assert named == {
        f"slipway-{path.stem}" for path in RULES
    }  # as launch/kubernetes/rules.sh makes them


def test_the_page_names_only_existing_things() -> None:
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
def test_each_wrong_name_on_the_page_is_detected(name: str) -> None:
    assert wrong_names(PAGE + name) - wrong_names(PAGE)


def test_the_runbook_names_only_error_codes_of_the_service() -> None:
    section = PAGE.split("### SlipwayUnavailableFast")[1].split("###")[0]
    assert set(re.findall(r"`([a-z_]+)`", section)) <= set(ERRORS)
    assert "queue_full" in section


def runbook_faults(name: str, section: str) -> list[str]:
    """The rules that one alert's section of the runbook breaks."""
    first, *lines = [line for line in section.splitlines() if line]
    parts = dict(re.findall(r"^\* \*\*(\w+):\*\* (.+?)(?=^\* |\Z)", section, re.M | re.S))
    severity = alerts()[name]["labels"]["severity"]
    faults = []
    if not first.lower().startswith(f"{severity}. "):
        faults.append(f"does not begin with {severity}")
    if len(lines) >= LONGEST_RUNBOOK:
        faults.append(f"has {len(lines) + 1} lines")
    if tuple(parts) != PARTS:
        return [*faults, f"has the parts {', '.join(parts)}"]
    if not re.search(r"`[^`]+`", parts["Check"]):
        faults.append("checks without a command")
    named = [place for place in PLATFORMS if re.search(rf"\b{place}\b", parts["Act"])]
    if "Everywhere:" not in parts["Act"] and tuple(named) != PLATFORMS:
        faults.append(f"acts only on {', '.join(named)}")
    queries = re.findall(r"`ask '([^`]+)'`", parts["Check"])
    used = {metric for query in queries for metric in metric_names(query)} - PROMETHEUS_OWN
    known = documented_metrics()
    unknown = {name for name in used if re.sub(r"_(sum|count|bucket)$", "", name) not in known}
    return faults + [f"uses {name}" for name in sorted(unknown)]


def runbook(name: str) -> str:
    return PAGE.partition(f"### {name}\n")[2].partition("\n#")[0]


@pytest.mark.parametrize("name", alerts())
def test_the_runbook_of_every_alert_says_what_to_check_decide_and_do(name: str) -> None:
    assert runbook_faults(name, runbook(name)) == []


@pytest.mark.parametrize(
    ("part", "instead", "fault"),
    [
        ("Ticket.", "Page.", "does not begin with ticket"),
        ("**Decide:**", "**Think:**", "has the parts Check, Think, Act"),
        ("`ask 'topk", "ask 'topk", "checks without a command"),
        ("slipway_drift_statistic", "slipway_drift", "uses slipway_drift"),
        ("Kubernetes:", "Elsewhere:", "acts only on Server, Compose"),
        ("* **Act", "one\n\ntwo\nthree\n* **Act", "has 10 lines"),
    ],
)
def test_each_fault_of_a_runbook_is_detected(part: str, instead: str, fault: str) -> None:
    section = runbook("SlipwayDrift")
    assert part in section
    found = runbook_faults("SlipwayDrift", section.replace(part, instead))
    assert found == [fault]
