"""Starts the service as a child process, as an operator would, on a free port of 127.0.0.1.

It runs with SETTINGS and the given settings; SLIPWAY_ variables of the caller do not reach it.
If it is not ready in time, the error shows the end of its log.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from slipway.system.errors import UnavailableError

READY_DEADLINE_S = 60.0
STOP_DEADLINE_S = 20.0
ANSWER_DEADLINE_S = 600.0
# The service has no other clients, so it need not drain. It refuses no row because the model, or a
# busy machine, is slow: a certificate is about answers, not about load.
SETTINGS = {
    "SLIPWAY_DRAIN_S": "0",
    "SLIPWAY_MAX_WAIT_S": f"{ANSWER_DEADLINE_S:g}",
    "SLIPWAY_REQUEST_TIMEOUT_S": f"{ANSWER_DEADLINE_S:g}",
}
_LOG_LINES = 15


@contextmanager
def running_service(
    command: list[str],
    settings: dict[str, str],
    log: Path,
    ready_deadline_s: float = READY_DEADLINE_S,
) -> Iterator[str]:
    """Start `command --host 127.0.0.1 --port FREE`, yield its URL once ready, stop it at the end.

    `settings` are its environment variables.

    Raises:
        UnavailableError: the service is not ready within the deadline.
    """
    port = free_port()
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SLIPWAY_")
    }
    environment = inherited | SETTINGS | settings
    log.parent.mkdir(parents=True, exist_ok=True)
    dies_with_parent = [sys.executable, "-m", "slipway.system.parent_death", str(os.getpid())]
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*dies_with_parent, *command, "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that its workers can be killed with it
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, child, log, ready_deadline_s)
        yield url
    finally:
        _stop(child)


def free_port() -> int:
    """Return a port of 127.0.0.1 that no process uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def serve_command() -> list[str]:
    """Return the command that starts the service."""
    return [sys.executable, "-m", "bentoml", "serve", "slipway.serving.service:Slipway"]


def _wait_until_ready(
    url: str, child: subprocess.Popen[bytes], log: Path, deadline_s: float
) -> None:
    last_answer, end = "no answer", time.monotonic() + deadline_s
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while time.monotonic() < end:
            if child.poll() is not None:
                raise UnavailableError(
                    f"the service ended with exit code {child.returncode} before it was ready.\n"
                    f"{_end_of(log)}"
                )
            try:
                answer = client.get(f"{url}/readyz")
            except httpx.HTTPError:
                time.sleep(0.1)
                continue
            if answer.status_code == httpx.codes.OK:
                return
            last_answer = f"{answer.status_code} {answer.text.strip()[:500]}"
            time.sleep(0.1)
    raise UnavailableError(
        f"the service was not ready within {deadline_s:g} s; /readyz said: {last_answer}\n"
        f"{_end_of(log)}"
    )


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the service; after the deadline, SIGKILL to it and its workers."""
    with suppress(ProcessLookupError):
        child.terminate()
    try:
        child.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return f"The end of {log}:\n" + "\n".join(f"  {line}" for line in lines)
