"""A Prometheus server in its own process."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests import plain_http
from tests.monitoring.queries import RULES
from tests.serving.server import free_port


@dataclass
class Prometheus:
    url: str
    log: Path
    targets: Path

    def scrape(self, target: str) -> None:
        """Scrape another process from now on, under the same instance label."""
        partial = self.targets.with_suffix(".partial")
        partial.write_text(json.dumps([{"targets": [target], "labels": {"instance": "a"}}]))
        partial.rename(self.targets)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of a query; AssertionError if it is invalid."""
        answer = plain_http.get(
            self.url + "/api/v1/query", params={"query": expression}, timeout=10
        )
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        """The value of a query with one series; None if it has none."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        """The names of the firing alerts."""
        return {found["metric"]["alertname"] for found in self.query('ALERTS{alertstate="firing"}')}

    def wait_until(self, what: str, is_so: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until a condition holds after one of the next scrapes."""
        started = time.monotonic()
        while not is_so():
            assert time.monotonic() - started < seconds, (
                f"not within {seconds} s: {what}\n{self.log.read_text()[-2000:]}"
            )
            time.sleep(0.2)


def without_delays(rules: str) -> str:
    """The rules with a pending time of one second for all alerts."""
    content = yaml.safe_load(rules)
    for group in content["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "1s"
    return yaml.safe_dump(content)


@contextmanager
def running_prometheus(
    folder: Path, configuration: Path, target: str, credentials: Path | None = None
) -> Iterator[Prometheus]:
    """Prometheus with a configuration of monitoring/ that scrapes `target` every second.

    Alerts fire without their usual delay.
    """
    folder.mkdir()
    (folder / "rules").mkdir()
    for path in RULES:
        (folder / "rules" / path.name).write_text(without_delays(path.read_text()))
    content = yaml.safe_load(configuration.read_text())
    content["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = content["scrape_configs"]
    del job["static_configs"]
    job["file_sd_configs"] = [{"files": ["targets.json"], "refresh_interval": "1s"}]
    if credentials:
        job["authorization"]["credentials_file"] = str(credentials)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(content))
    address, log = f"127.0.0.1:{free_port()}", folder / "prometheus.log"
    prometheus = Prometheus(f"http://{address}", log, folder / "targets.json")
    prometheus.scrape(target)
    command = [
        "prometheus",
        "--config.file=prometheus.yml",
        "--storage.tsdb.path=data",
        f"--web.listen-address={address}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        prometheus.wait_until("it is ready", lambda: is_ready(prometheus.url))
        yield prometheus
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(url: str) -> bool:
    try:
        return plain_http.get(url + "/-/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
