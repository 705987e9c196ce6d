"""`kill -9` before and after the effect of every step: the next call continues, and none twice."""

import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.loop.__main__ import advance, decide
from slipway.loop.decisions import PersonDecision
from slipway.loop.journal import JOURNAL, Cycle, cycles, read_journal
from slipway.loop.machine import LoopFacts, NextStep
from slipway.loop.steps import LoopProject
from slipway.serving.monitoring.settings import Limits
from slipway.serving.monitoring.store import Store
from slipway.serving.rollout import commands
from slipway.serving.rollout.history import change_rollout
from slipway.serving.rollout.records.entries import HISTORY, read_history
from slipway.serving.rollout.reports import NO_COUNTS, Report, process_started, write_report
from slipway.serving.rollout.state import read_rollout
from slipway.serving.settings import Settings
from slipway.system import files
from tests.loop.cases import comparison, loop_params
from tests.project_params import PROJECT
from tests.serving.rolling import scaled_classifier, write_candidate

NOW = 2_000_000_000.0
ORDER = [
    *("triggered", "collected", "merged", "trained", "compared", "shadowed", "requested"),
    *("notified", "decided", "canary", "ended"),
]


@dataclass(frozen=True)
class KilledProject(LoopProject):
    """A project whose process kills itself once at each point; its training is a copy."""

    candidate: Path = Path()
    points: Path = Path()  # one line for each visited point

    def facts(self, last: Cycle | None, now: float) -> LoopFacts:
        is_open = last is not None and last.is_open
        found = LoopFacts(now, ("drift",), 1000, self.served().version)
        if not is_open or last is None:
            return found
        return replace(found, candidate=replace(self.candidate_facts(last), shadowed=1000))

    def take(self, step: NextStep, cycle: Cycle, now: float) -> dict[str, Any]:
        self._kill_at(f"before {step.action}")
        detail = self._effect(step, cycle, now)
        self._kill_at(f"after {step.action}")
        return detail

    def _effect(self, step: NextStep, cycle: Cycle, now: float) -> dict[str, Any]:
        match step.action:
            case "trigger":
                served = self.served().version
                return {"reasons": ["drift"], "since": 0.0, "served": served}
            case "collect" | "merge":
                return {}
            case "train":
                return self._trained(cycle)
            case "compare":
                found = comparison((0.9, 0.7), (0.9, 0.9))
                return {"outcome": None, "why": "", "comparison": found.model_dump(mode="json")}
        return super().take(step, cycle, now)

    def _trained(self, cycle: Cycle) -> dict[str, Any]:
        with files.new_directory(self.place(cycle.number)) as folder:
            shutil.copytree(self.candidate, folder, dirs_exist_ok=True)
        bundle = load_bundle(self.place(cycle.number) / "bundle")
        return {
            "experiment": "loop-1-1",
            "version": bundle.version,
            "bundle_digest": bundle.digest,
            "certificate_digest": "c",
            "data_digest": "d",
            "gates": "passed",
        }

    def _kill_at(self, point: str) -> None:
        visited = self.points.read_text().splitlines() if self.points.exists() else []
        if point not in visited:
            with self.points.open("a") as file:
                file.write(f"{point}\n")
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def web_hook(received: list[str]) -> Iterator[str]:
    """Serve a web hook that notes the id of each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.headers["Idempotency-Key"])
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def serve_first_model(settings: Settings, folder: Path) -> None:
    """Deploy a model, and report a worker that serves it: this process."""
    commands.propose(settings, "deploy", write_candidate(folder))
    stable = read_rollout(settings.state).stable
    assert stable is not None
    write_report(
        settings.state,
        Report(
            process=os.getpid(),
            started=process_started(os.getpid()),
            stopped=False,
            revision=1,
            serving=stable.version,
            folder=stable.folder,
            problem="",
            candidate=None,
            phase="none",
            reason="",
            disagreement=0.0,
            counts=NO_COUNTS,
            stable_p95_s=0.0,
            num_latencies=0,
        ),
    )


def exit_code(project: KilledProject) -> int | None:
    """Run `slipway loop` in a process of its own."""
    process = multiprocessing.get_context("fork").Process(
        target=advance, args=(project, lambda: NOW)
    )
    process.start()
    process.join(60)
    return process.exitcode


def last_cycle(project: KilledProject) -> Cycle | None:
    return next(reversed(cycles(read_journal(project.folder / JOURNAL))), None)


def act_as_person_and_workers(project: KilledProject) -> None:
    """Approve a pending request, and promote a canary."""
    last = last_cycle(project)
    if last is None or not last.has("notified"):
        return
    requested = last.detail("requested")
    if not last.has("decided"):
        decision = PersonDecision(
            format_version=1,
            request=requested["digest"],
            version=requested["version"],
            verdict="approved",
            by="anna",
            reason="looks right",
            time=NOW,
        )
        decide(project, decision, NOW)
    elif last.has("canary") and read_rollout(project.settings.state).candidate is not None:
        change_rollout(project.settings.state, lambda now: now.ended("promoted", "no evidence"))


@pytest.mark.process
def test_a_loop_that_is_killed_at_every_step_takes_each_step_once(tmp_path: Path) -> None:
    settings = Settings(state=tmp_path / "state", bundle=tmp_path / "none")
    serve_first_model(settings, tmp_path / "first")
    with closing(Store(settings.state, Limits(1000, 3600.0, 1000, 3600.0))) as windows:
        windows.tidy()  # the service has written its database
    write_candidate(tmp_path / "candidate", scaled_classifier(2.0))
    received: list[str] = []
    with web_hook(received) as address:
        params = PROJECT.model_copy(update={"loop": loop_params(webhook=address)})
        project = KilledProject(
            params, settings, tmp_path, tmp_path / "candidate", tmp_path / "points"
        )
        codes = Counter[int | None]()
        for _ in range(60):
            codes[exit_code(project)] += 1
            act_as_person_and_workers(project)
            last = last_cycle(project)
            if last is not None and not last.is_open:
                break
    points = (tmp_path / "points").read_text().splitlines()
    assert len(points) == 2 * (len(ORDER) - 1)  # all but the person's
    assert codes[-signal.SIGKILL] == len(points)
    steps = read_journal(project.folder / JOURNAL)
    assert [step.what for step in steps] == ORDER
    assert steps[-1].detail["outcome"] == "promoted"
    history = read_history(settings.state / HISTORY)
    proposed = [entry.reason.split()[0] for entry in history if entry.what == "proposed"]
    assert proposed == ["deploy", "shadow", "canary"]
    assert [entry.by for entry in history if entry.reason.startswith("canary")] == ["anna"]
    # The receiver may see a request twice, with the same id.
    request = json.loads((project.folder / "0001/request.json").read_bytes())
    assert set(received) == {request["id"]}
