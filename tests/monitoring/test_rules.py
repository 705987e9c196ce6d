"""Alerts fire and resolve in `promtool` tests, and link to their runbooks."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.queries import (
    MONITORING,
    ROOT,
    RULE_TESTS,
    RULES,
    alerts,
    metric_names,
    recorded,
)

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)
# By alert: (test, whether the alert fires), in order of time.
Evals = dict[str, list[tuple[str, bool]]]


def promtool(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=240
    )


@needs_promtool
def test_promtool_accepts_rules_and_configurations() -> None:
    configurations = sorted(MONITORING.glob("prometheus*.yml"))
    assert len(configurations) == 2
    for done in (
        promtool("check", "rules", *RULES),
        promtool("check", "config", "--syntax-only", *configurations),
    ):
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
@needs_promtool
def test_the_promtool_tests_of_all_alerts_pass() -> None:
    with ThreadPoolExecutor() as threads:
        for done in threads.map(lambda path: promtool("test", "rules", path), RULE_TESTS):
            assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("rule", "wrong", "alert"),
    [
        (
            "slipway_gpu_temperature_celsius > 85",
            "slipway_gpu_temperature_celsius > 95",
            "SlipwayGpuHot",
        ),  # never fires
        (
            "slipway_gpu_temperature_celsius > 85",
            "slipway_gpu_temperature_celsius > 5",
            "SlipwayGpuHot",
        ),  # always fires
        (
            "> 0.95\n        for: 10m",
            "> 0.95\n        for: 1m",
            "SlipwayGpuMemoryNearlyFull",
        ),  # too early
    ],
)
def test_a_wrong_rule_fails_its_promtool_test(
    tmp_path: Path, rule: str, wrong: str, alert: str
) -> None:
    shutil.copytree(MONITORING, tmp_path / "monitoring")
    path = tmp_path / "monitoring/rules/alerts.yml"
    assert rule in path.read_text()
    path.write_text(path.read_text().replace(rule, wrong))
    tests = tmp_path / "monitoring/tests/gpu.yml"
    if wrong.endswith("1m"):  # 2 minutes after the start, within the delay of the real rule
        tests.write_text(
            tests.read_text().replace(
                f"{{ eval_time: 5m, alertname: {alert} }}",
                f"{{ eval_time: 8m, alertname: {alert} }}",
            )
        )
    done = promtool("test", "rules", tests)
    assert done.returncode != 0
    assert alert in done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("low", "fires"), [(1.5, False), (2.5, True)], ids=["by chance", "for certain"]
)
def test_an_rmse_pages_only_if_the_lower_end_of_its_interval_misses_the_objective(
    tmp_path: Path, low: float, fires: bool
) -> None:
    shutil.copytree(MONITORING / "rules", tmp_path / "rules")
    path = tmp_path / "rules/slo.yml"
    assert path.read_text().count("expr: vector(Inf)") == 1  # the objective for the RMSE
    path.write_text(path.read_text().replace("expr: vector(Inf)", "expr: vector(2)"))
    alert = alerts()["SlipwayFeedbackQualityLow"]
    expected = {
        "exp_labels": alert["labels"] | {"job": "slipway", "instance": "a:3000", "metric": "rmse"},
        "exp_annotations": alert["annotations"]
        | {"summary": f"a:3000: rmse over the latest feedback is at best {low}"},
    }
    series = {
        "slipway_feedback_quality": 3,
        "slipway_feedback_quality_low": low,
        "slipway_feedback_quality_high": 9,
    }
    labels = 'job="slipway", instance="a:3000"'
    inputs = [
        {"series": f'{name}{{{labels}, metric="rmse"}}', "values": f"{value}x60"}
        for name, value in series.items()
    ]
    inputs.append({"series": f"slipway_feedback_quality_rows{{{labels}}}", "values": "30x60"})
    evaluation = {
        "eval_time": "30m",
        "alertname": "SlipwayFeedbackQualityLow",
        "exp_alerts": [expected] if fires else [],
    }
    test = {"interval": "1m", "input_series": inputs, "alert_rule_test": [evaluation]}
    content = {
        "rule_files": ["rules/slo.yml", "rules/alerts.yml"],
        "group_eval_order": ["slipway_slo", "slipway_model"],
        "tests": [test],
    }
    (tmp_path / "rmse.yml").write_text(yaml.safe_dump(content))
    done = promtool("test", "rules", tmp_path / "rmse.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def evaluations(files: list[dict[str, Any]]) -> Evals:
    found: Evals = {}
    for content in files:
        for test in content["tests"]:
            for evaluation in test["alert_rule_test"]:
                found.setdefault(evaluation["alertname"], []).append(
                    (test["name"], bool(evaluation.get("exp_alerts")))
                )
    return found


def untested(found: Evals, names: set[str]) -> dict[str, str]:
    """The missing test cases by alert."""
    lacking = {}
    for name in names:
        tests: dict[str, list[bool]] = {}
        for test, fires in found.get(name, []):
            tests.setdefault(test, []).append(fires)
        if not any(True in fires for fires in tests.values()):
            lacking[name] = "never fires"
        elif not any(
            fires[0] is False and True in fires and fires[-1] is False for fires in tests.values()
        ):
            lacking[name] = "has no test in which it does not fire, then fires, then resolves"
    return lacking


def test_every_alert_has_a_test_in_which_it_does_not_fire_then_fires_then_resolves() -> None:
    assert (
        untested(
            evaluations([yaml.safe_load(path.read_text()) for path in RULE_TESTS]), set(alerts())
        )
        == {}
    )


def test_an_alert_without_such_a_test_is_detected() -> None:
    found = {
        "A": [("one", False), ("one", True), ("one", False)],
        "B": [("one", False), ("two", True)],
        "C": [("one", False)],
    }
    assert untested(found, {"A", "B", "C", "D"}) == {
        "B": "has no test in which it does not fire, then fires, then resolves",
        "C": "never fires",
        "D": "never fires",
    }


def test_every_alert_has_a_severity_a_description_and_a_runbook() -> None:
    headings = {
        title.lower()
        for title in re.findall(
            r"^### (\w+)$", (ROOT / "docs/how-to/operations.md").read_text(), re.MULTILINE
        )
    }
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in {"page", "ticket"}, name
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}, name
        page, _, section = rule["annotations"]["runbook_url"].partition("#")
        assert (page, section) == ("docs/how-to/operations.md", name.lower())
        assert section in headings, f"{page} has no section ### {name}"


def test_every_runbook_section_belongs_to_an_alert() -> None:
    sections = set(
        re.findall(
            r"^### (Slipway\w+)$", (ROOT / "docs/how-to/operations.md").read_text(), re.MULTILINE
        )
    )
    assert sections == set(alerts())


def test_recorded_series_are_used_and_recorded_before_their_use() -> None:
    known: set[str] = set()
    for name, query in recorded().items():
        assert {used for used in metric_names(query) if ":" in used} <= known, name
        known.add(name)
    used = {used for rule in alerts().values() for used in metric_names(rule["expr"])}
    used |= {name for query in recorded().values() for name in metric_names(query)}
    assert known - used == set()


def test_each_objective_is_stated_once() -> None:
    text = "".join(path.read_text() for path in RULES)
    for name in ("availability", "latency", "accuracy", "rmse"):
        assert text.count(f"record: slipway:objective:{name}") == 1
    assert text.count('le="') == 1  # the bound of the latency
