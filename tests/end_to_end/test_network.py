"""The pipeline and the service connect only to loopback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.project import Project, wait_until_ready

pytestmark = pytest.mark.process


def attempts(project: Project) -> list[str]:
    """The logged attempts to leave this machine; skips the test if they cannot be logged."""
    if not project.loopback_only():
        pytest.skip("no C compiler here (cc) to build the library that logs network traffic")
    return project.network_log.read_text().splitlines() if project.network_log.exists() else []


def test_the_pipeline_and_the_service_connect_only_to_loopback(
    finished: Project, service: str
) -> None:
    wait_until_ready(service)
    assert attempts(finished) == []


def test_a_service_started_from_a_bare_shell_connects_only_to_loopback(
    finished: Project,
) -> None:
    before = attempts(finished)
    unset = (
        "-u ORT_DISABLE_TELEMETRY -u BENTOML_DO_NOT_TRACK "
        "-u DVC_NO_ANALYTICS -u RAY_USAGE_STATS_ENABLED"
    )
    with finished.service(f"env {unset} bentoml serve") as address:
        wait_until_ready(address)
    assert attempts(finished) == before


def test_a_stage_started_from_a_bare_shell_connects_only_to_loopback(
    finished: Project,
) -> None:
    before = attempts(finished)
    finished.shell(
        "env -u ORT_DISABLE_TELEMETRY -u BENTOML_DO_NOT_TRACK python -m slipway.stages.compile"
    )
    assert attempts(finished) == before


@pytest.mark.parametrize(
    "code",
    [
        "socket.socket().connect(('192.0.2.1', 9))",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))",
        "socket.socket(socket.AF_INET6).connect(('2001:db8::1', 9))",
        "socket.getaddrinfo('host.example', 80)",
    ],
)
def test_an_attempt_to_leave_this_machine_is_refused_and_logged(
    finished: Project, tmp_path: Path, code: str
) -> None:
    attempts(finished)
    log = tmp_path / "network.log"
    environment = {**os.environ, **finished.loopback_only(), "ONLY_LOOPBACK_LOG": str(log)}
    ended = subprocess.run(
        [sys.executable, "-c", f"import socket; {code}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert any(name in log.read_text() for name in ("192.0.2.1", "2001:db8::1", "host.example"))
