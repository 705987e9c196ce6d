"""Queries of monitoring/, by place, and the metrics that they use.

The metric names of a PromQL query are the words that remain without strings, selectors, label
lists, ranges, functions, keywords and numbers. In the tests, `promtool` checks the full syntax.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "monitoring"
RULES = sorted((MONITORING / "rules").glob("*.yml"))
RULE_TESTS = sorted((MONITORING / "tests").glob("*.yml"))
DASHBOARDS = sorted((MONITORING / "grafana/dashboards").glob("*.json"))

KEYWORDS = {
    "and",
    "or",
    "unless",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "bool",
    "offset",
    "inf",
    "nan",
}
PROMETHEUS_OWN = {"up"}  # exists for every target
_STRING = re.compile(r'"(?:\\.|[^"\\])*"' + r"|'(?:\\.|[^'\\])*'")
_SELECTOR, _RANGE = re.compile(r"\{[^{}]*\}"), re.compile(r"\[[^\[\]]*\]")
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^()]*\)")
_NUMBER = re.compile(r"(?<![\w:])(?:0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?[smhdwy]?)(?![\w:])")
_NAME = re.compile(r"[A-Za-z_:][\w:]*(?!\s*\()(?![\w:])")


def metric_names(query: str) -> set[str]:
    """The metrics and recorded series that a query uses."""
    for pattern in (_STRING, _SELECTOR, _RANGE, _LABELS, _NUMBER):
        query = pattern.sub(" ", query)
    return {name for name in _NAME.findall(query) if name.lower() not in KEYWORDS}


@cache
def rule_groups() -> list[dict[str, Any]]:
    """All rule groups."""
    return [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]


def recorded() -> dict[str, str]:
    """The query of each recorded series."""
    return {
        rule["record"]: rule["expr"]
        for group in rule_groups()
        for rule in group["rules"]
        if "record" in rule
    }


def alerts() -> dict[str, dict[str, Any]]:
    """The rule of each alert."""
    return {
        rule["alert"]: rule for group in rule_groups() for rule in group["rules"] if "alert" in rule
    }


def dashboards() -> dict[str, dict[str, Any]]:
    """Each dashboard by file name."""
    return {path.name: json.loads(path.read_text()) for path in DASHBOARDS}


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """(place, query) of every panel, annotation and variable, with Grafana variables filled in."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                yield f"{name}: {panel['title']} {target['refId']}", filled(target["expr"])
        for annotation in dashboard["annotations"]["list"]:
            yield f"{name}: {annotation['name']}", filled(annotation["expr"])
        for variable in dashboard["templating"]["list"]:
            found = re.fullmatch(r"label_values\((.+), \w+\)", variable.get("definition", ""))
            if found:
                yield f"{name}: {variable['name']}", filled(found[1])


def filled(query: str) -> str:
    """A panel's query with values for Grafana's variables."""
    return query.replace("$__rate_interval", "1m").replace("$job", ".+").replace("$instance", ".+")


def queries() -> dict[str, str]:
    """Every query by place."""
    return (
        recorded()
        | {name: rule["expr"] for name, rule in alerts().items()}
        | dict(dashboard_queries())
    )


def base_name(name: str, known: set[str]) -> str:
    """The histogram's name for `_bucket`, `_sum` and `_count` series, otherwise the name itself."""
    return next(
        (
            name.removesuffix(part)
            for part in ("_bucket", "_sum", "_count")
            if name.removesuffix(part) in known
        ),
        name,
    )


def documented_metrics() -> set[str]:
    """The metrics in the table of docs/reference/serving.md."""
    return set(
        re.findall(
            r"^\| `(slipway_\w+)`", (ROOT / "docs/reference/serving.md").read_text(), re.MULTILINE
        )
    )


def documented_labels() -> dict[str, set[str]]:
    """The labels of each metric that the table of docs/reference/serving.md lists."""
    rows = re.findall(
        r"^\| `(slipway_\w+)` \| ([^|]*) \|",
        (ROOT / "docs/reference/serving.md").read_text(),
        re.MULTILINE,
    )
    return {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in rows
        if "`" in labels or not labels.strip()
    }


def unknown_labels(known: dict[str, set[str]]) -> dict[str, set[str]]:
    """By place: "metric: label" for each selected or grouped label that the metric lacks."""
    found: dict[str, set[str]] = {}
    for place, query in queries().items():
        asked = [
            (name, re.findall(r"(\w+)\s*(?:=~?|![=~])", selector))
            for name, selector in re.findall(r"(\w+)\{([^}]*)\}", query)
        ]
        grouped = re.findall(r"by \(([^()]*)\) \((?:rate|increase)\((\w+)", query)
        asked += [(name, re.findall(r"\w+", labels)) for labels, name in grouped]
        for name, labels in asked:
            base = base_name(name, set(known))
            if base in known:
                wrong = set(labels) - known[base] - {"job", "instance", "le"}
                found.setdefault(place, set()).update(f"{base}: {label}" for label in wrong)
    return {place: labels for place, labels in found.items() if labels}


def unknown_names(known: set[str]) -> dict[str, set[str]]:
    """By place: names that are neither in `known`, nor recorded, nor built into Prometheus."""
    own = set(recorded()) | PROMETHEUS_OWN
    found = {
        place: {name for name in metric_names(query) - own if base_name(name, known) not in known}
        for place, query in queries().items()
    }
    return {place: names for place, names in found.items() if names}
