"""Grafana dashboards are well formed, with valid PromQL and existing metrics."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.queries import (
    MONITORING,
    dashboard_queries,
    dashboards,
    documented_labels,
    documented_metrics,
    metric_names,
    queries,
    unknown_labels,
    unknown_names,
)
from tests.monitoring.test_rules import needs_promtool, promtool

KINDS = {"row", "stat", "timeseries", "table", "heatmap", "alertlist"}
UNITS = {"short", "none", "s", "bytes", "reqps", "percentunit", "celsius"}  # from Grafana's list
WIDTH = 24  # columns of Grafana's grid


def test_metric_names_finds_only_the_metrics_of_a_query() -> None:
    query = (
        "histogram_quantile(0.99, sum by (le, stage) "
        '(rate(slipway_a_bucket{b="slipway_c", d=~"x|y"}[5m:1m] offset 1h))) > 1e3'
        " / on (job) group_left (e) f:g:h and not_a_function unless nan_count * Inf"
    )
    assert metric_names(query) == {"slipway_a_bucket", "f:g:h", "not_a_function", "nan_count"}


def test_every_metric_in_rules_and_dashboards_is_in_the_docs() -> None:
    assert unknown_names(documented_metrics()) == {}


def test_an_unknown_metric_in_a_query_is_detected() -> None:
    without = documented_metrics() - {"slipway_ready", "slipway_prediction_duration_seconds"}
    assert "SlipwayNotReady" in unknown_names(without)
    assert any(
        "slipway_prediction_duration_seconds_bucket" in names
        for names in unknown_names(without).values()
    )


def test_every_label_in_rules_and_dashboards_exists_on_its_metric() -> None:
    """A selector with a label that the metric lacks matches nothing and reports no error."""
    assert unknown_labels(documented_labels()) == {}


def test_an_unknown_label_in_a_query_is_detected() -> None:
    known = documented_labels()
    without = known | {
        "slipway_errors_total": set(),
        "slipway_swaps_total": {"result"},
        "slipway_classes_total": set(),
    }
    assert unknown_labels(without).keys() >= {
        "SlipwayFaults",
        "SlipwayRolledBack",
        "model.json: Classes A",
        "service.json: Errors by code A",
    }


@needs_promtool
def test_every_query_of_a_dashboard_is_valid_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"query_{number}", "expr": query}
        for number, (_, query) in enumerate(dashboard_queries())
    ]
    assert len(rules) > 40
    assert check_rules(tmp_path, rules) == 0
    assert (
        check_rules(tmp_path, [*rules, {"record": "wrong", "expr": "sum by (slipway_ready"}]) != 0
    )  # an invalid query fails the check


def check_rules(folder: Path, rules: list[dict[str, str]]) -> int:
    path = folder / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    return promtool("check", "rules", "--lint=none", path).returncode


def faults(dashboard: dict[str, Any]) -> list[str]:
    """Faults that Grafana would display incorrectly."""
    found = []
    panels = dashboard["panels"]
    numbers = [panel["id"] for panel in panels]
    if len(set(numbers)) < len(numbers):
        found.append("two panels have one id")
    taken: dict[tuple[int, int], int] = {}
    for panel in panels:
        place, name = panel["gridPos"], panel["title"]
        if place["x"] + place["w"] > WIDTH:
            found.append(f"{name} is wider than the page")
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            if taken.setdefault(cell, panel["id"]) != panel["id"]:
                found.append(f"{name} lies on another panel")
                break
        if panel["type"] not in KINDS:
            found.append(f"{name} is of an unknown type, {panel['type']}")
        if panel["type"] not in {"row", "alertlist"}:
            found += faults_of_queries(panel)
    return found


def faults_of_queries(panel: dict[str, Any]) -> list[str]:
    name, targets = panel["title"], panel["targets"]
    found = [] if targets and panel["description"] else [f"{name} has no query or no description"]
    if len({target["refId"] for target in targets}) < len(targets):
        found.append(f"two queries of {name} have one letter")
    if any(target["datasource"]["uid"] != "${datasource}" for target in targets):
        found.append(f"{name} asks one Prometheus whatever is chosen")
    if any("$job" not in target["expr"] for target in targets):
        found.append(f"{name} is not of the chosen service")
    if panel["fieldConfig"]["defaults"]["unit"] not in UNITS:
        found.append(f"{name} has an unknown unit")
    return found


def test_the_dashboards_are_well_formed() -> None:
    assert {name: faults(dashboard) for name, dashboard in dashboards().items()} == {
        "model.json": [],
        "service.json": [],
    }
    assert len({dashboard["uid"] for dashboard in dashboards().values()}) == 2
    for dashboard in dashboards().values():
        assert [variable["name"] for variable in dashboard["templating"]["list"]] == [
            "datasource",
            "job",
            "instance",
        ]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"id": 2}, "two panels have one id"),
        ({"gridPos": {"x": 20, "y": 90, "w": 8, "h": 8}}, "is wider than the page"),
        ({"gridPos": {"x": 0, "y": 0, "w": 8, "h": 8}}, "lies on another panel"),
        ({"type": "singlestat"}, "is of an unknown type"),
        ({"targets": []}, "no query"),
        ({"fieldConfig": {"defaults": {"unit": "seconds"}}}, "has an unknown unit"),
    ],
)
def test_each_fault_of_a_panel_is_detected(change: dict[str, Any], fault: str) -> None:
    dashboard = json.loads(json.dumps(dashboards()["service.json"]))
    dashboard["panels"][9] |= change
    assert any(fault in line for line in faults(dashboard))


def test_every_metric_of_the_service_is_in_a_rule_or_on_a_dashboard() -> None:
    shown = {name for query in queries().values() for name in metric_names(query)}
    unseen = {
        name
        for name in documented_metrics()
        if not shown & {name, *(f"{name}_{part}" for part in ("bucket", "sum", "count"))}
    }
    assert unseen == set()


def test_grafana_provisioning_matches_the_mounts_and_services_of_compose(root: Path) -> None:
    services = yaml.safe_load((root / "launch/compose.yaml").read_text())["services"]
    mounted = dict(
        volume.split(":")[:2]
        for volume in services["grafana"]["volumes"]
        if volume.startswith("../")
    )
    provider = yaml.safe_load(
        (MONITORING / "grafana/provisioning/dashboards/slipway.yml").read_text()
    )["providers"][0]
    assert mounted["../monitoring/grafana/dashboards"] == provider["options"]["path"]
    assert mounted["../monitoring/grafana/provisioning"] == "/etc/grafana/provisioning"
    source = yaml.safe_load(
        (MONITORING / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    scrape = yaml.safe_load((MONITORING / "prometheus.secured.yml").read_text())["global"][
        "scrape_interval"
    ]
    assert source["jsonData"]["timeInterval"] == scrape
