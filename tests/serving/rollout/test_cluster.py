"""A canary on Kubernetes, with simulated traffic and a recorded route instead of a cluster.

The effect of the weights on a real Gateway is not tested here.
"""

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from slipway.serving.rollout import commands
from slipway.serving.rollout.cluster import Cluster, roll_out
from slipway.serving.rollout.history import Author
from slipway.serving.rollout.records.entries import HISTORY, read_history
from slipway.serving.rollout.state import Rollout, RolloutError, RolloutPlan, read_rollout
from slipway.serving.settings import Settings
from slipway.traffic.postgres import DATABASE_URL

PLAN = RolloutPlan(steps=(0.1, 0.5, 1.0), hold_s=20, hold_requests=50)
OLD, NEW = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


@dataclass
class Traffic:
    """Simulated requests to both models, drawn by the weights, and Prometheus' counts of them."""

    failing: float = 0.0  # fraction of the candidate's requests
    fraction: float = 0.0
    new: str = NEW
    fractions: list[float] = field(default_factory=list)
    values: dict[tuple[str, str], float] = field(default_factory=dict)  # by job and code
    now: float = 1000.0
    at: Callable[["Traffic"], None] = lambda traffic: None
    draws: random.Random = field(default_factory=lambda: random.Random(3))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(200):
            is_new = self.draws.random() < self.fraction
            failed = self.draws.random() < (self.failing if is_new else 0.01)
            key = ("slipway-candidate" if is_new else "slipway", "500" if failed else "200")
            self.values[key] = self.values.get(key, 0.0) + 1
        self.at(self)

    def result(self, query: str) -> list[dict[str, Any]]:
        if query.startswith("slipway_model_info"):
            found = {"slipway": OLD, "slipway-candidate": self.new}
            return [
                {"metric": {"job": job, "model_version": version}, "value": [0, "1"]}
                for job, version in found.items()
            ]
        return [
            {"metric": {"job": job, "code": code, "pod": "1"}, "value": [0, str(value)]}
            for (job, code), value in self.values.items()
        ]


class CountedCluster(Cluster):
    """A cluster whose route and Prometheus are a `Traffic`."""

    traffic: Traffic

    def set_fraction(self, fraction: float) -> None:
        if [fraction] != self.traffic.fractions[-1:]:
            self.traffic.fractions.append(fraction)
        self.traffic.fraction = fraction

    def _query(self, metric: str, condition: str) -> list[tuple[dict[str, str], float]]:
        return [(one["metric"], float(one["value"][1])) for one in self.traffic.result(metric)]


def rolled(state: Path, traffic: Traffic) -> Rollout:
    cluster = CountedCluster("default", "slipway", "slipway", "slipway-candidate", "")
    object.__setattr__(cluster, "traffic", traffic)
    author = Author("ann", "a new camera")
    return roll_out(state, cluster, PLAN, author, 15, traffic.wait, lambda: traffic.now)


def test_cluster_rollout_gives_an_equal_candidate_all_requests_step_by_step(tmp_path: Path) -> None:
    traffic = Traffic(failing=0.01)
    last = rolled(tmp_path, traffic).events[-1]
    assert (last.what, last.model) == ("promoted", NEW)
    assert traffic.fractions == [0.1, 0.5, 1.0]
    history = read_history(tmp_path / HISTORY)
    whats = ["proposed", "began", "step", "step", "promoted"]
    assert [one.what for one in history] == whats
    assert (history[0].by, history[0].reason) == ("ann", "canary by command: a new camera")


def test_cluster_rollout_withdraws_a_candidate_that_fails_more_often(tmp_path: Path) -> None:
    traffic = Traffic(failing=0.3)
    last = rolled(tmp_path, traffic).events[-1]
    assert last.what == "rolled_back"
    assert "its requests fail more often" in last.reason
    assert traffic.fractions == [0.1, 0.0] or traffic.fractions == [0.1, 0.5, 0.0]


def test_cluster_rollout_counts_restarted_pods_without_loss(tmp_path: Path) -> None:
    def restart(traffic: Traffic) -> None:
        traffic.values = {key: value % 100 for key, value in traffic.values.items()}

    assert rolled(tmp_path, Traffic(failing=0.01, at=restart)).events[-1].what == "promoted"


def test_killed_cluster_command_continues_with_its_evidence(tmp_path: Path) -> None:
    def killed(traffic: Traffic) -> None:
        if traffic.now == 1060:
            raise KeyboardInterrupt

    traffic = Traffic(failing=0.01, at=killed)
    with pytest.raises(KeyboardInterrupt):
        rolled(tmp_path, traffic)
    assert read_rollout(tmp_path).candidate is not None
    assert rolled(tmp_path, traffic).events[-1].what == "promoted"
    assert sum(one.what == "proposed" for one in read_history(tmp_path / HISTORY)) == 1


def test_abort_ends_a_rollout_on_a_cluster(tmp_path: Path) -> None:
    def abort(traffic: Traffic) -> None:
        if traffic.now == 1060:
            commands.abort(Settings(state=tmp_path), Author("ben", "callers complain"))

    traffic = Traffic(failing=0.01, at=abort)
    assert rolled(tmp_path, traffic).events[-1].by == "ben"
    assert traffic.fractions[-1] == 0.0


def test_another_version_behind_the_candidates_name_ends_the_rollout(tmp_path: Path) -> None:
    def replaced(traffic: Traffic) -> None:
        traffic.new = "cccccccccccc"

    last = rolled(tmp_path, Traffic(failing=0.01, at=replaced)).events[-1]
    assert last.what == "rolled_back"
    assert "serves cccccccccccc instead" in last.reason


def test_a_candidate_with_the_stable_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="in slipway-candidate that slipway does not serve"):
        rolled(tmp_path, Traffic(new=OLD))


def test_a_cluster_rollout_beside_a_shared_one_is_refused_before_it_changes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATABASE_URL, "postgresql://nobody@127.0.0.1:1/none")
    traffic = Traffic(failing=0.01)
    with pytest.raises(RolloutError, match=r"SLIPWAY_DATABASE_URL is set.*Expected.*Unset it"):
        rolled(tmp_path, traffic)
    assert not traffic.fractions
    assert not list(tmp_path.iterdir())


@contextmanager
def prometheus(traffic: Traffic) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            (query,) = parse_qs(urlsplit(self.path).query)["query"]
            content = {"status": "success", "data": {"result": traffic.result(query)}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_cluster_rollout_queries_prometheus_and_sets_both_weights_with_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/asked\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    traffic = Traffic(values={("slipway", "200"): 7.0})
    with prometheus(traffic) as url:
        cluster = Cluster("here", "slipway", "slipway", "slipway-candidate", url)
        assert list(cluster.counters().values()) == [7.0]
        assert cluster.versions("slipway-candidate") == {NEW}
        cluster.set_fraction(0.25)
    *command, patch = (tmp_path / "asked").read_text().splitlines()
    assert command == ["--namespace", "here", "patch", "httproute", "slipway", "--type=json"]
    changes = json.loads(patch.removeprefix("--patch="))
    assert [one["value"] for one in changes] == ["slipway", 750, "slipway-candidate", 250]
    program.write_text("#!/bin/sh\necho not found >&2\nexit 1\n")
    with pytest.raises(RolloutError, match=r"failed: not found. Expected a route"):
        cluster.set_fraction(0.5)
    with pytest.raises(RolloutError, match="did not answer a query"):
        cluster.counters()
