"""Starts the real service in its own process, as an operator does."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests import plain_http

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def workers(self) -> list[int]:
        """Return the process ids of the workers."""
        return [
            int(child)
            for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            .read_text()
            .split()
        ]

    def worker(self) -> int:
        """Return the process id of the first worker."""
        return self.workers()[0]

    def wait(self, path: str = "/readyz", status: int = 200, seconds: float = 60) -> float:
        """Wait until `path` responds with `status`. Returns the seconds."""
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if plain_http.get(self.url + path, timeout=5).status_code == status:
                    return time.monotonic() - started
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        raise AssertionError(f"no {status} from {path} in {seconds} s:\n{self.log.read_text()}")


def copy_service(folder: Path) -> Path:
    """Make a package `slipway` in `folder`, and return its room `serving`.

    That room is a copy, for a test to change; the others are links.
    """
    (folder / "slipway").mkdir(parents=True)
    for path in (ROOT / "slipway").iterdir():
        if path.name not in ("serving", "__pycache__"):
            (folder / "slipway" / path.name).symlink_to(path)
    serving = folder / "slipway/serving"
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(ROOT / "slipway/serving", serving, ignore=ignored)


def until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until `is_so()` is true. Raises AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"it is not so after {seconds} s"
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def environment(folder: Path, **settings: object) -> dict[str, str]:
    """Return a service's variables for the bundle in `folder`, with a BENTOML_HOME there."""
    paths = {
        "bundle": folder / "bundle",
        "certificate": folder / "certificate.json",
        "engine": folder / "engine",
        "state": folder / "state",
    }
    quick = {"drain_s": 0}  # no load balancer waits for its end
    variables = {
        f"SLIPWAY_{name.upper()}": str(value) for name, value in (paths | quick | settings).items()
    }
    # Without PYTHONDONTWRITEBYTECODE, the service compiles the checkout's code only once.
    left_out = ("SLIPWAY_", "PROMETHEUS_", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return (
        inherited
        | variables
        | {"BENTOML_HOME": str(folder / "bentoml"), "BENTOML_DO_NOT_TRACK": "True"}
    )


@contextmanager
def running(
    folder: Path,
    target: str = "slipway.serving.service:Slipway",
    cwd: Path = ROOT,
    under: tuple[str, ...] = (),
    port: int | None = None,
    host: str = "127.0.0.1",
    **settings: object,
) -> Iterator[Server]:
    """Start a server, and end it by SIGTERM, cleanly. `under` is a command that runs it."""
    port, log = port or free_port(), folder / "service.log"
    command = [
        *under,
        sys.executable,
        "-m",
        "bentoml",
        "serve",
        target,
        "--host",
        host,
        "--port",
        str(port),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(folder, **settings),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Server(process, f"http://127.0.0.1:{port}", log)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
