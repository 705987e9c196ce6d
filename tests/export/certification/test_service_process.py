import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from slipway.export.certification import service_process
from slipway.export.certification.service_process import SETTINGS, running_service
from slipway.serving.http.responses import Refusal
from slipway.serving.models.admission import Admission
from slipway.serving.settings import Settings
from slipway.system.errors import UnavailableError
from tests import plain_http

pytestmark = pytest.mark.process

SERVICE = """
import http.server, os, signal, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
host = sys.argv[sys.argv.index("--host") + 1]
print("log line", flush=True)
BEFORE
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        settings = [str(os.environ.get(f"SLIPWAY_{name}")) for name in ("MINE", "FOREIGN")]
        seen = [str(os.getpid()), *settings]
        body = STATUS_BODY if self.path == "/readyz" else " ".join(seen).encode()
        self.send_response(STATUS if self.path == "/readyz" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer((host, port), Handler).serve_forever()
"""


def command(tmp_path: Path, before: str = "", status: int = 200) -> list[str]:
    """Return the command of a fake service that first runs the code `before`.

    It responds to `/readyz` with `status`, and to other paths with its id and environment.
    """
    script = tmp_path / "service.py"
    script.write_text(
        SERVICE.replace("BEFORE", before)
        .replace("STATUS_BODY", "b'warming up'")
        .replace("STATUS", str(status))
    )
    return [sys.executable, str(script)]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return b"State:\tZ" not in Path(f"/proc/{pid}/status").read_bytes()


def test_running_service_stops_the_service_at_the_end_of_its_block(tmp_path: Path) -> None:
    with running_service(command(tmp_path), {}, tmp_path / "log") as url:
        pid = int(plain_http.get(f"{url}/pid").text.split()[0])
        assert is_running(pid)
    assert not is_running(pid)
    assert (tmp_path / "log").read_text() == "log line\n"


def test_only_the_given_settings_reach_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_FOREIGN", "from the caller's shell")
    with running_service(command(tmp_path), {"SLIPWAY_MINE": "mine"}, tmp_path / "log") as url:
        assert plain_http.get(f"{url}/").text.split()[1:] == ["mine", "None"]


@pytest.mark.unit
def test_the_service_of_verify_refuses_no_row_of_a_model_that_takes_a_second_for_each() -> None:
    def send_everything(max_wait_s: float) -> None:
        admission = Admission(1000, max_wait_s, 1, shed=lambda _: None)
        for _ in range(10):
            admission.ran(1, 1.0)
        for size in (1, 2, 7, 64) * 2:  # the rows of the requests that are sent at the same time
            admission.enter(size)

    send_everything(float(SETTINGS["SLIPWAY_MAX_WAIT_S"]))
    with pytest.raises(Refusal):
        send_everything(Settings().max_wait_s)


def test_a_service_that_exits_at_once_is_refused_with_its_last_output(tmp_path: Path) -> None:
    dying = command(tmp_path, before="sys.exit('no such model')")
    with (
        pytest.raises(
            UnavailableError, match=r"exit code 1 before it was ready(.|\n)*no such model"
        ),
        running_service(dying, {}, tmp_path / "log"),
    ):
        pass


def test_a_service_that_never_becomes_ready_is_refused_with_its_reason(tmp_path: Path) -> None:
    waiting = running_service(
        command(tmp_path, status=503), {}, tmp_path / "log", ready_deadline_s=2.0
    )
    with (
        pytest.raises(
            UnavailableError,
            match=r"not ready within 2 s; /readyz said: 503 warming up(.|\n)*log line",
        ),
        waiting,
    ):
        pass


def test_a_service_is_stopped_when_the_block_raises(tmp_path: Path) -> None:
    pids = []

    def fail() -> None:
        with running_service(command(tmp_path), {}, tmp_path / "log") as url:
            pids.append(int(plain_http.get(f"{url}/pid").text.split()[0]))
            raise KeyError("ours")

    with pytest.raises(KeyError):
        fail()
    assert not is_running(pids[0])


def test_a_service_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_process, "STOP_DEADLINE_S", 0.5)
    deaf = command(tmp_path, before="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    with running_service(deaf, {}, tmp_path / "log") as url:
        pid = int(plain_http.get(f"{url}/pid").text.split()[0])
    assert not is_running(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux-only")
def test_end_with_ends_the_process_at_once_if_the_parent_is_already_dead(root: Path) -> None:
    gone, zombie = (subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2))
    gone.wait()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)  # it ended, and stays in the table
    for parent, code in (
        (gone.pid, -signal.SIGTERM),
        (zombie.pid, -signal.SIGTERM),
        (os.getpid(), 7),
    ):
        command = [
            sys.executable,
            "-m",
            "slipway.system.parent_death",
            str(parent),
            sys.executable,
            "-c",
            "raise SystemExit(7)",
        ]
        assert subprocess.run(command, cwd=root, check=False).returncode == code
    zombie.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux-only")
def test_the_service_ends_with_its_killed_parent(tmp_path: Path, root: Path) -> None:
    parent_code = f"""
        import sys, time
        from pathlib import Path
        from tests import plain_http
        from slipway.export.certification.service_process import running_service
        with running_service({command(tmp_path)!r}, {{}}, Path({str(tmp_path / "log")!r})) as url:
            print(plain_http.get(url + "/pid").text.split()[0], flush=True)
            time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent_code)],
        stdout=subprocess.PIPE,
        cwd=root,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(pid)
