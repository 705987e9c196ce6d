"""Prometheus scrapes a running service: queries return data, alerts fire and resolve."""

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipway.serving.auth.keys import digest_of, make_key
from slipway.serving.gpu.extension import GAUGES
from tests import plain_http
from tests.monitoring.prometheus import Prometheus, running_prometheus
from tests.monitoring.queries import (
    MONITORING,
    alerts,
    base_name,
    metric_names,
    queries,
    recorded,
    rule_groups,
    unknown_names,
)
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.ready_service import ready_service
from tests.serving.server import Server, free_port, running

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed (Debian: prometheus)",
    ),
]
PNG = {"content-type": "image/png"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready_service(tmp_path_factory.mktemp("service")) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus") / "run"
    with running_prometheus(folder, MONITORING / "prometheus.yml", address(server)) as prometheus:
        yield prometheus


def scraped(server: Server) -> set[str]:
    """The metrics of the service after its first prediction, and the GPU metrics."""
    plain_http.post(server.url + "/predict", content=picture(), headers=PNG)
    # Monitoring counts rows in the background, some seconds after the response.
    ended = time.monotonic() + 30
    while (
        "slipway_classes_total{" not in (text := plain_http.get(server.url + "/metrics").text)
        and time.monotonic() < ended
    ):
        time.sleep(0.2)
    return set(re.findall(r"^# HELP (\w+)", text, re.MULTILINE)) | set(GAUGES)


def test_every_metric_in_rules_and_dashboards_is_in_a_live_scrape(server: Server) -> None:
    assert unknown_names(scraped(server)) == {}


def test_counters_of_alerts_on_missing_increases_exist_from_the_start(server: Server) -> None:
    """increase() of a series that does not exist returns nothing, so the alert would not fire."""
    lines = plain_http.get(server.url + "/metrics").text.splitlines()
    waited_for = re.findall(
        r"increase\((slipway_\w+\{[^}]*\})\[\w+\]\)\) == 0",
        "\n".join(rule["expr"] for rule in alerts().values()),
    )
    assert waited_for == [
        'slipway_monitored_rows_total{outcome="monitored"}',
        'slipway_feedback_total{outcome="joined"}',
    ]
    assert [
        series for series in waited_for if not any(line.startswith(f"{series} ") for line in lines)
    ] == []


def test_the_latency_bound_is_a_bucket_of_the_live_histogram(server: Server) -> None:
    bounds = set(
        re.findall(
            r'slipway_prediction_duration_seconds_bucket\{le="([^"]+)"\}',
            plain_http.get(server.url + "/metrics").text,
        )
    )
    asked = set(re.findall(r'le="([^"]+)"', recorded()["instance:slipway_predict_fast:total"]))
    assert len(asked) == 1
    assert asked <= bounds
    assert "0.26" not in bounds  # the comparison can fail


def test_labels_in_queries_exist_on_the_live_metrics(server: Server) -> None:
    """A selector with a label that the metric lacks matches nothing and reports no error."""
    for _ in range(3):
        plain_http.post(server.url + "/predict", content=picture(), headers=PNG)
    text = plain_http.get(server.url + "/metrics").text
    labels: dict[str, set[str]] = {}
    for name, found in re.findall(r"^(slipway_\w+)\{(.*)\} ", text, re.MULTILINE):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', found))
    of_prometheus = {"job", "instance"}
    checked = set()
    for place, query in queries().items():
        for name, selector in re.findall(r"(slipway_\w+)\{([^}]*)\}", query):
            asked = set(re.findall(r"(\w+)\s*=~?", selector)) | set(
                re.findall(r"(\w+)\s*![=~]", selector)
            )
            if name in labels:
                assert asked <= labels[name] | of_prometheus, (place, name)
                checked.add((name, frozenset(asked - of_prometheus)))
    assert ("slipway_requests_total", frozenset({"route", "code"})) in checked


def test_prometheus_evaluates_every_query(server: Server, prometheus: Prometheus) -> None:
    prometheus.wait_until(
        "it is scraped", lambda: prometheus.value("instance:slipway_predict:total") is not None
    )
    before = prometheus.value("instance:slipway_predict:total") or 0
    for number in range(30):
        plain_http.post(server.url + "/predict", content=picture(number), headers=PNG)
    prometheus.wait_until(
        "they are counted",
        lambda: (prometheus.value("instance:slipway_predict:total") or 0) == before + 30,
    )
    prometheus.wait_until(
        "the first rate", lambda: prometheus.value("job:slipway_unavailable:burn_rate5m") == 0
    )
    answers = {place: prometheus.query(query) for place, query in queries().items()}
    assert prometheus.value("instance:slipway_predict:total") == prometheus.value(
        "instance:slipway_predict_timed:total"
    )
    assert prometheus.value("instance:slipway_predict_bad:total") == 0
    full = {place for place, answer in answers.items() if answer}
    assert {
        "service.json: Requests A",
        "service.json: Time of a prediction A",
        "service.json: Memory A",
    } <= full


def test_no_alert_fires_for_a_healthy_service(prometheus: Prometheus) -> None:
    assert prometheus.firing() == set()
    rules = plain_http.get(prometheus.url + "/api/v1/rules").json()["data"]["groups"]
    found = [rule for group in rules for rule in group["rules"]]
    assert len(found) == sum(len(group["rules"]) for group in rule_groups())
    assert [rule["name"] for rule in found if rule.get("lastError")] == []


@pytest.mark.nightly(seconds=18)
def test_alerts_fire_while_the_service_is_not_ready_or_gone_and_resolve_when_it_is_back(
    tmp_path: Path,
) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    model = tmp_path / "bundle/model_fp32.onnx"
    payload = model.read_bytes()
    model.write_bytes(payload[:-1] + b"\0")
    with contextlib.ExitStack() as stack:
        with running(tmp_path) as refused:
            prometheus = stack.enter_context(
                running_prometheus(
                    tmp_path / "run", MONITORING / "prometheus.yml", address(refused)
                )
            )
            prometheus.wait_until(
                "SlipwayNotReady fires", lambda: prometheus.firing() == {"SlipwayNotReady"}
            )
        prometheus.wait_until("SlipwayDown fires", lambda: prometheus.firing() == {"SlipwayDown"})
        model.write_bytes(payload)
        with running(tmp_path) as repaired:
            repaired.wait()
            prometheus.scrape(address(repaired))
            prometheus.wait_until(
                "none fires",
                lambda: prometheus.firing() == set() and prometheus.value("slipway_ready") == 1,
            )


@pytest.mark.nightly(seconds=14)
def test_prometheus_scrapes_the_admin_port_only_with_a_valid_key(
    tmp_path: Path,
) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    key, port = make_key(), free_port()
    (tmp_path / "keys").write_text(f"prometheus:operator:{digest_of(key.encode()).hex()}\n")
    (tmp_path / "key").write_text(key)
    with running(tmp_path, keys=tmp_path / "keys", admin_port=port) as server:
        server.wait()
        assert (
            plain_http.get(
                server.url + "/metrics", headers={"authorization": f"Bearer {key}"}
            ).status_code
            == 404
        )  # not on this port
        configuration = MONITORING / "prometheus.secured.yml"
        with running_prometheus(
            tmp_path / "run", configuration, f"127.0.0.1:{port}", tmp_path / "key"
        ) as prometheus:
            prometheus.wait_until("it is scraped", lambda: prometheus.value("slipway_ready") == 1)
            (tmp_path / "key").write_text(make_key())
            prometheus.wait_until(
                "SlipwayDown fires", lambda: prometheus.firing() == {"SlipwayDown"}
            )


def address(server: Server) -> str:
    return server.url.removeprefix("http://")


def test_recorded_series_are_never_confused_with_metrics_of_the_service() -> None:
    """`unknown_names` ignores only series that the rules record."""
    assert not {name for name in recorded() if name.startswith("slipway_")}
    assert (
        base_name(
            "slipway_prediction_duration_seconds_bucket", {"slipway_prediction_duration_seconds"}
        )
        == "slipway_prediction_duration_seconds"
    )
    assert base_name("slipway_count", {"slipway_prediction_duration_seconds"}) == "slipway_count"
    assert metric_names("slipway_ready == 0") == {"slipway_ready"}
