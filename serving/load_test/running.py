"""The real service with one candidate's settings, as a child process of the tuner on a free port of 127.0.0.1.

It has the caller's settings but for those below: no keys, ports or hosts, since nobody else asks it; a state of its own, so that the
windows, predictions and kept requests of the service in use stay what they are.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.load_test.candidates import SettingsCandidate
from serving.load_test.load import ask_each
from serving.load_test.samples import Samples
from serving.request_log.logger import RequestLogSettings
from serving.rollout.state import read_rollout
from serving.rollout.store import settings_of
from serving.settings import PREFIX, ROOT, Settings
from serving.worker import LOADING
from slipway.system.errors import DataError, UnavailableError

READY_S = 60.0  # that a start may take
_STOP_S = 20.0
_UNUSED = ("KEYS", "ALLOW_ANYONE", "HOSTS", "ADMIN_PORT", "ADMIN_HOST")
_ALL_READY = "slipway_ready "  # the metric's line


@dataclass(frozen=True)
class Running:
    """A service that is ready, every worker of it."""

    url: str
    model: dict[str, Any]  # what /model answers


def served_settings(settings: Settings) -> Settings:
    """The settings with the model that a start would serve, which may be one that was rolled out."""
    return settings_of(settings, read_rollout(settings.state).stable)


@contextmanager
def running(
    settings: Settings,
    candidate: SettingsCandidate,
    environment: Mapping[str, str],
    folder: Path,
    target: str = "serving.service:Slipway",
) -> Iterator[Running]:
    """Start it, wait for every worker, end it. UnavailableError in one line if it does not become ready; its log stays in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    port, log = _free_port(), folder / "service.log"
    command = [
        sys.executable,
        "-m",
        "slipway.system.parent_death",
        str(os.getpid()),
        sys.executable,
        "-m",
        "bentoml",
        "serve",
        target,
    ]
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=ROOT,
            env=environment_of(settings, candidate, environment, folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that its workers can be ended with it, and Ctrl-C is the tuner's alone
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, child, log, candidate)
        yield Running(url, json.loads(_get(f"{url}/model")[1]))
    finally:
        _stop(child)


def environment_of(
    settings: Settings, candidate: SettingsCandidate, environment: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """The environment of the child: the caller's, with the model of `settings` and the candidate's own settings."""
    without = {f"{PREFIX}{name}" for name in _UNUSED}
    kept = {
        name: value
        for name, value in environment.items()
        if name not in without and not name.startswith("PROMETHEUS_")
    }
    paths = {
        f"{PREFIX}{name.upper()}": str(getattr(settings, name))
        for name in ("bundle", "certificate", "engine", "rebuilt_engine")
    }
    own = {
        f"{PREFIX}STATE": str(folder / "state"),
        f"{PREFIX}DRAIN_S": "0",
        f"{PREFIX}REBUILD_ENGINE": "false",
    }
    if settings.section(RequestLogSettings).keep_directory:
        own[f"{PREFIX}KEEP_DIRECTORY"] = str(folder / "kept")
    bentoml = {"BENTOML_HOME": str(folder / "bentoml"), "BENTOML_DO_NOT_TRACK": "True"}
    return kept | paths | own | bentoml | candidate.settings()


def require_answered(url: str, samples: Samples) -> None:
    """DataError with the service's own words if it refuses one of the samples: nothing could be learned from refusals."""
    for answer in ask_each(url, samples.requests):
        if answer.status != 200:
            raise DataError(
                f"the service refuses sample {answer.number + 1}: {answer.status} {answer.body.decode(errors='replace')[:300]}"
            )


def _wait_until_ready(
    url: str, child: subprocess.Popen[bytes], log: Path, candidate: SettingsCandidate
) -> None:
    said, end = "nothing", time.monotonic() + READY_S
    which = " ".join(f"{name}={value}" for name, value in candidate.settings().items())
    while time.monotonic() < end:
        if child.poll() is not None:
            raise UnavailableError(
                f"the service with {which} ended with exit code {child.returncode}: {_last_line(log)}"
            )
        try:
            status, said = _get(f"{url}/readyz")
            if status == 200 and _num_ready(_get(f"{url}/metrics")[1]) >= candidate.workers:
                return
        except OSError:  # it does not listen yet
            status = 0
        if status == 503 and LOADING not in said:
            raise UnavailableError(f"the service with {which} does not become ready: {said[:500]}")
        time.sleep(0.05)
    raise UnavailableError(
        f"the service with {which} was not ready within {READY_S:g} s; /readyz said {said[:500]}; its log is {log}"
    )


def _num_ready(metrics: str) -> float:
    return next(
        (float(line.split()[1]) for line in metrics.splitlines() if line.startswith(_ALL_READY)),
        0.0,
    )


def _get(url: str) -> tuple[int, str]:
    """(status, body); OSError where there is no answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _stop(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL to it and its workers if they are still there after a while."""
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        child.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
