"""`slipway rollout cluster`: a canary between two Deployments on Kubernetes.

The steps and decisions are those of a canary on one machine (slipway/serving/rollout/decision.py).
The counts come from Prometheus, and `kubectl` sets the weights of an HTTPRoute. SLIPWAY_STATE is a
folder of this command only, so `status`, `abort`, `promote` and `slipway history` work on it, and a
killed command continues.
"""

import json
import os
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipway.serving.rollout.decision import decide
from slipway.serving.rollout.evidence import Counts, total
from slipway.serving.rollout.history import Author, change_rollout
from slipway.serving.rollout.reports import NO_COUNTS, Report, process_started, read_reports
from slipway.serving.rollout.state import (
    Allowed,
    Candidate,
    Model,
    Rollout,
    RolloutError,
    RolloutPlan,
    read_rollout,
)
from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.traffic.postgres import DATABASE_URL, given_url

FILE = "cluster.json"
_ROUTES = "/predict|/v2/models/.+/infer"
_TIMEOUT_S = 30.0
_WEIGHTS = 1000  # sum of the weights of both models


class ClusterCounts(Contract):
    """The content of `cluster.json`: the requests and events counted so far for one candidate."""

    format_version: Literal[1]
    candidate: int  # id of the candidate that was counted
    last: dict[str, float]  # value of each counter at the last reading
    counts: Counts


@dataclass(frozen=True)
class Cluster:
    """The two Deployments, and the addresses of Prometheus and `kubectl` for them."""

    namespace: str
    route: str  # name of the HTTPRoute
    stable: str  # name of its first backend and of its job in Prometheus
    candidate: str  # the same for its second backend
    prometheus: str  # URL

    def counters(self) -> dict[str, float]:
        """Return the number of predictions by pod, route and status.

        The keys are labels as JSON.
        """
        found = self._query("slipway_requests_total", f'route=~"{_ROUTES}"')
        return {json.dumps(labels, sort_keys=True): value for labels, value in found}

    def versions(self, job: str) -> set[str]:
        """Return the versions of the models that a Deployment serves."""
        found = self._query("slipway_model_info", "")
        return {labels["model_version"] for labels, _ in found if labels["job"] == job}

    def set_fraction(self, fraction: float) -> None:
        """Set the candidate's fraction of the requests.

        Raises RolloutError with the reason of `kubectl`.
        """
        weight = round(_WEIGHTS * fraction)
        patch: list[dict[str, Any]] = []
        for place, (name, value) in enumerate(
            ((self.stable, _WEIGHTS - weight), (self.candidate, weight))
        ):
            path = f"/spec/rules/0/backendRefs/{place}"
            patch += [
                {"op": "test", "path": f"{path}/name", "value": name},
                {"op": "replace", "path": f"{path}/weight", "value": value},
            ]
        command = ["kubectl", "--namespace", self.namespace, "patch", "httproute", self.route]
        try:
            done = subprocess.run(
                [*command, "--type=json", f"--patch={json.dumps(patch)}"],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RolloutError(f"{' '.join(command)} failed: {error}") from error
        if done.returncode != 0:
            raise RolloutError(
                f"{' '.join(command)} failed: {done.stderr.strip()}. Expected a route whose first "
                f"rule has the backends {self.stable} and {self.candidate}, as in "
                "launch/kubernetes/canary."
            )

    def _query(self, metric: str, condition: str) -> list[tuple[dict[str, str], float]]:
        jobs = f'namespace="{self.namespace}",job=~"{self.stable}|{self.candidate}"'
        query = f"{metric}{{{jobs}{',' * bool(condition)}{condition}}}"
        url = f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
                content = json.load(answer)
            return [(one["metric"], float(one["value"][1])) for one in content["data"]["result"]]
        except (OSError, ValueError, KeyError) as error:
            raise RolloutError(
                f"{self.prometheus} did not answer a query ({error}), expected the address of "
                "Prometheus. Check --prometheus."
            ) from error


def roll_out(
    state: Path,
    cluster: Cluster,
    plan: RolloutPlan,
    author: Author,
    every_s: float,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
) -> Rollout:
    """Roll out the candidate of a cluster, and return the state at the end.

    A failed reading or patch is printed and repeated; the fraction does not grow meanwhile.
    """
    _propose(state, cluster, plan, author, clock())
    while True:
        try:
            rollout = _advance(state, cluster, clock())
            cluster.set_fraction(_fraction(rollout))
            if rollout.candidate is None:
                return rollout
        except RolloutError as error:
            print(f"warning: {error}", file=sys.stderr, flush=True)
        wait(every_s)


def count(before: ClusterCounts, values: Mapping[str, float], job: str, fraction: float) -> Counts:
    """Return the counts after a reading of all counters; a restarted pod counts from 0 again.

    Args:
        job: the candidate's job in Prometheus.
        fraction: the candidate's largest since the last reading; too large a fraction only weakens
            the evidence.
    """
    errors, requests = [0, 0], [0, 0]
    for labels, value in values.items():
        earlier = before.last.get(labels, 0.0)
        grown = round(value - earlier if value >= earlier else value)
        content = json.loads(labels)
        requests[content["job"] != job] += grown
        errors[content["job"] != job] += grown * content["code"].startswith("5")
    if not fraction:
        return before.counts
    new = NO_COUNTS.model_copy(
        update={
            "events": {"errors": {repr(fraction): (errors[0], errors[1])}},
            "requests": (requests[0], requests[1]),
        }
    )
    return total([before.counts, new])


def _propose(state: Path, cluster: Cluster, plan: RolloutPlan, author: Author, now: float) -> None:
    """Propose the version that the candidate's Deployment serves, or continue its rollout."""
    if given_url() is not None:
        raise RolloutError(
            f"{DATABASE_URL} is set: its services follow one rollout of their own, which `status`, "
            "`abort` and `promote` would act on. Expected a rollout in SLIPWAY_STATE only. Unset "
            f"it for this rollout: env -u {DATABASE_URL} slipway rollout cluster. Or roll out the "
            "bundle to these services: slipway rollout canary BUNDLE"
        )
    if any(report.is_alive for report in read_reports(state)):
        raise RolloutError(
            f"a service follows {state}, expected a folder of this command only. Set "
            "SLIPWAY_STATE to another one."
        )
    found = {job: cluster.versions(job) for job in (cluster.stable, cluster.candidate)}
    versions = found[cluster.candidate]
    if len(versions) != 1 or versions & found[cluster.stable]:
        shown = {job: ", ".join(sorted(some)) or "none" for job, some in found.items()}
        raise RolloutError(
            f"{cluster.candidate} serves {shown[cluster.candidate]}, and {cluster.stable} "
            f"{shown[cluster.stable]}; expected one version in {cluster.candidate} that "
            f"{cluster.stable} does not serve. Apply the Deployment with the new "
            "image, and wait until Prometheus has read its metrics. "
            f"Services that share {DATABASE_URL} serve its model, whatever their images hold: roll "
            "out to them by `slipway rollout canary BUNDLE`."
        )
    (version,) = versions

    def change(rollout: Rollout) -> Rollout:
        if rollout.candidate is not None:
            if rollout.candidate.name == version:
                return rollout  # a killed command proposed it; continue
            raise RolloutError(
                f"{rollout.candidate.name} is being rolled out, expected no other candidate. End "
                "it first: slipway rollout abort"
            )
        candidate = Candidate(
            id=rollout.revision + 1,
            mode="canary",
            # The files are in the image. The second part would name a copy.
            model=Model(folder=f"{version}-{'0' * 8}", version=version, digest=""),
            replaces=rollout.stable,
            allowed=Allowed(),
            plan=plan,
            phase="preparing",
            since=now,
        )
        reason = f"canary {author.because}"
        return rollout.changed(candidate=candidate).with_event(
            "proposed", version, reason, author.name
        )

    change_rollout(state, change, is_shared=False)


def _advance(state: Path, cluster: Cluster, now: float) -> Rollout:
    """Read the counters, decide the next step, and return the new state."""
    rollout = read_rollout(state)
    candidate = rollout.candidate
    if candidate is None:  # `abort` or `promote` ended it
        return rollout
    others = cluster.versions(cluster.candidate) - {candidate.name}
    if others:
        reason = f"its Deployment serves {', '.join(sorted(others))} instead"
        return change_rollout(
            state,
            lambda now_: now_.ended("rolled_back", reason) if now_.candidate else now_,
            is_shared=False,
        )
    values = cluster.counters()
    before = _read_counts(state, candidate.id, values)
    counts = count(before, values, cluster.candidate, candidate.fraction)
    after = ClusterCounts(format_version=1, candidate=candidate.id, last=values, counts=counts)
    files.write_json(state / FILE, after.model_dump(mode="json"))
    process = os.getpid()
    report = Report(
        process=process,
        started=process_started(process),
        stopped=False,
        revision=rollout.revision,
        serving=None,
        folder=None,
        problem="",
        candidate=candidate.id,
        phase="prepared",
        reason="",
        disagreement=1.0,  # nothing is shadowed
        counts=counts,
        stable_p95_s=0.0,
        num_latencies=0,
    )
    return change_rollout(state, lambda rollout: decide(rollout, [report], now), is_shared=False)


def _read_counts(state: Path, candidate: int, values: Mapping[str, float]) -> ClusterCounts:
    """Return the counts of `candidate` so far; for a new one, start from the present values."""
    path = state / FILE
    if path.exists():
        fix = "Remove it: the evidence of the candidate begins again."
        found = parse_record(ClusterCounts, path, path.read_bytes(), RolloutError, fix)
        if found.candidate == candidate:
            return found
    return ClusterCounts(format_version=1, candidate=candidate, last=dict(values), counts=NO_COUNTS)


def _fraction(rollout: Rollout) -> float:
    if rollout.candidate is not None:
        return rollout.candidate.fraction
    return float(rollout.events[-1].what in ("promoted", "swapped"))
