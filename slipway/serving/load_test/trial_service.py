"""Runs the service with one candidate's settings, as a child process on a free local port.

It inherits the user's settings, but has no keys, ports or allowed hosts, because only the load test
connects. It has its own state, so it does not touch the windows, predictions and request log of the
service in production.
"""

import json
import os
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

from slipway.serving.load_test.candidates import SettingsCandidate
from slipway.serving.load_test.load import ask_each
from slipway.serving.load_test.samples import Samples
from slipway.serving.process.addresses import free_port
from slipway.serving.request_log.logger import RequestLogSettings
from slipway.serving.rollout.state import read_rollout
from slipway.serving.rollout.store import settings_of
from slipway.serving.settings import PREFIX, ROOT, Settings
from slipway.serving.worker import LOADING
from slipway.system.errors import DataError, UnavailableError

READY_S = 60.0  # time limit of a start
_STOP_S = 20.0
_UNUSED = ("KEYS", "DISABLE_AUTH", "ALLOWED_HOSTS", "ADMIN_PORT", "ADMIN_HOST")
_ALL_READY = "slipway_ready "  # beginning of the metric's line


@dataclass(frozen=True)
class TrialService:
    """A running service whose workers are all ready."""

    url: str
    model: dict[str, Any]  # the answer to `GET /model`


def served_settings(settings: Settings) -> Settings:
    """Return the settings with the rolled-out model in place of SLIPWAY_BUNDLE, if there is one."""
    return settings_of(settings, read_rollout(settings.state).stable)


@contextmanager
def running(
    settings: Settings,
    candidate: SettingsCandidate,
    environment: Mapping[str, str],
    folder: Path,
    target: str = "slipway.serving.service:Slipway",
) -> Iterator[TrialService]:
    """Run the service during the block. Raises UnavailableError if it does not become ready.

    Its log stays in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, log = free_port(), folder / "service.log"
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
            start_new_session=True,  # its workers end with it; Ctrl-C reaches only the tuner
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, child, log, candidate)
        yield TrialService(url, json.loads(_get(f"{url}/model")[1]))
    finally:
        _stop(child)


def environment_of(
    settings: Settings, candidate: SettingsCandidate, environment: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """Return the environment variables of a trial service.

    They are those in `environment`, with the model files of `settings` and the settings of
    `candidate` in place of the user's.
    """
    without = {f"{PREFIX}{name}" for name in _UNUSED}
    inherited = {
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
    if settings.section(RequestLogSettings).request_log_directory:
        own[f"{PREFIX}REQUEST_LOG_DIRECTORY"] = str(folder / "request_log")
    bentoml = {"BENTOML_HOME": str(folder / "bentoml"), "BENTOML_DO_NOT_TRACK": "True"}
    return inherited | paths | own | bentoml | candidate.settings()


def require_answered(url: str, samples: Samples) -> None:
    """Raise DataError with the service's response if it refuses one of the samples."""
    for answer in ask_each(url, samples.requests):
        if answer.status != 200:
            raise DataError(
                f"the service refuses sample {answer.number + 1}: {answer.status} "
                f"{answer.body.decode(errors='replace')[:300]}"
            )


def _wait_until_ready(
    url: str, child: subprocess.Popen[bytes], log: Path, candidate: SettingsCandidate
) -> None:
    answer, end = "nothing", time.monotonic() + READY_S
    which = " ".join(f"{name}={value}" for name, value in candidate.settings().items())
    while time.monotonic() < end:
        if child.poll() is not None:
            raise UnavailableError(
                f"the service with {which} ended with exit code {child.returncode}: "
                f"{_last_line(log)}"
            )
        try:
            status, answer = _get(f"{url}/readyz")
            if status == 200 and _num_ready(_get(f"{url}/metrics")[1]) >= candidate.workers:
                return
        except OSError:  # it does not listen yet
            status = 0
        if status == 503 and LOADING not in answer:
            raise UnavailableError(
                f"the service with {which} does not become ready: {answer[:500]}"
            )
        time.sleep(0.05)
    raise UnavailableError(
        f"the service with {which} was not ready within {READY_S:g} s; /readyz answered "
        f"{answer[:500]}; its log is {log}"
    )


def _num_ready(metrics: str) -> float:
    return next(
        (float(line.split()[1]) for line in metrics.splitlines() if line.startswith(_ALL_READY)),
        0.0,
    )


def _get(url: str) -> tuple[int, str]:
    """Send a GET request. Returns status and body. Raises OSError if there is no response."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "its log is empty"


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the service; after a timeout, SIGKILL to its process group."""
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        child.wait()
