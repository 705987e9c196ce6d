"""The hop `browser`: a real Chromium predicts every test row from its original bytes.

The page itself runs, with `hop.js` as one more script, which fetches rows from a server on
127.0.0.1 and sends back the pixels or numbers that the network took, and the predictions. A PNG
must give exactly Slipway's pixels. A JPEG is decoded by the browser: its pixels may differ by
MOST_LEVELS, the difference is recorded, and no label may change. A page with WebGPU predicts each
row by both runtimes, and `browser/webgpu` is a hop of its own.
"""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipway.artifacts.certificate import Hop
from slipway.artifacts.uncertainty import Answers, flipped_rows
from slipway.export.certification.comparison import failed, not_executed
from slipway.export.certification.http_hop import RowPayload
from slipway.export.targets.exported import ExportSource, TargetAnswers, compare
from slipway.kinds.registry import input_kind

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
NAME = "browser"
WEBGPU = "browser/webgpu"
# Of 255, after resizing. Chromium's libjpeg-turbo gives ours exactly; another build of it may
# round chroma differently. A resize by a canvas is off by 7 to 25 levels.
MOST_LEVELS = 3
# During the hop the page's certificate offers WebGPU, with no row to compare before.
_OFFER = b"slipway.certificate = { hops: [], webgpu: { reason: '', rows: [] } };"
_PAGE = package_files("slipway.export.targets.browser") / "page"
_SILENCE_S = 120.0  # longest time without any message from the page
_JPEG = b"\xff\xd8"
_NO_GPU = ("--disable-gpu",)
# Else headless Chromium gives no adapter. Without a GPU it is SwiftShader, on the CPU.
_GPU = ("--enable-unsafe-webgpu", "--enable-features=Vulkan")
_FLAGS = (
    "--headless=new", "--disable-dev-shm-usage", "--no-first-run",
    "--no-default-browser-check", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions",
)  # fmt: skip
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}


def find_browser() -> str | None:
    """Return the path of Chromium or Chrome; None without one."""
    return next((found for name in COMMANDS if (found := shutil.which(name))), None)


@dataclass
class Conversation:
    """The rows to send to the page, and the messages that the page sent back."""

    payloads: list[RowPayload]
    rounds: int
    answers: dict[int, bytes] = field(default_factory=dict)
    fault: str | None = None
    hop: str = NAME  # the hop of the fault
    done: dict[str, Any] | None = None
    last: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)


def run_browser_hop(
    folder: Path, source: ExportSource, has_webgpu: bool = False
) -> tuple[list[Hop], dict[str, Any]]:
    """Run the hops on the page in `folder`; return them with facts on decoder and browser."""
    requested = source.requested("browser", "wasm")
    browser = find_browser()
    if browser is None:
        reason = (
            "there is no Chromium here, expected one of " + ", ".join(COMMANDS) + ". To run it: "
            "apt-get install chromium, then export again"
        )
        return [not_executed(NAME, requested, reason)], {}
    payloads = sorted(source.rows.payloads(), key=lambda payload: payload.position)
    talk = Conversation(payloads, source.rows.timing_rounds)
    flags = _GPU if has_webgpu else _NO_GPU
    with _serving(folder, talk) as url, _browsing(browser, flags, url) as process:
        while not talk.ended.wait(0.2):
            if process.poll() is not None:
                talk.fault = f"the browser ended with {process.returncode}"
            elif time.monotonic() - talk.last > _SILENCE_S:
                talk.fault = f"the page was silent for {_SILENCE_S:.0f} s"
            if talk.fault:
                break
    if talk.fault or talk.done is None:
        return [failed(talk.hop, requested, str(talk.fault))], {}
    return judge(source, talk, talk.done)


def judge(
    source: ExportSource, talk: Conversation, done: dict[str, Any]
) -> tuple[list[Hop], dict[str, Any]]:
    """Compare the page's inputs and predictions with the packed rows and the certified graph's.

    `done` has the browser's name, the speed, and for a page with WebGPU the adapter and its speed,
    or the reason why there is none.
    """
    requested, webgpu = source.requested("browser", "wasm"), done["webgpu"]
    rows, contract = source.rows.comparison.rows, source.bundle.manifest.input
    packed = np.ascontiguousarray(rows.inputs[:])
    num_outputs = max(1, len(rows.classes))
    num_answers = 2 if webgpu and "adapter" in webgpu else 1
    head = 4 * (num_outputs + 1) * num_answers
    length = head + packed[0].nbytes
    wrong = [row for row, body in talk.answers.items() if len(body) != length]
    if wrong or len(talk.answers) < len(rows.ids):
        reason = (
            f"{len(talk.answers)} of {len(rows.ids)} rows were answered, {len(wrong)} in another "
            f"form than {head // 4} numbers and an input of {packed[0].nbytes} bytes"
        )
        return [failed(NAME, requested, reason)], {}
    bodies = [talk.answers[payload.position] for payload in talk.payloads]
    numbers = np.stack([np.frombuffer(body[:head], "<f4") for body in bodies])
    inputs = np.stack(
        [np.frombuffer(body[head:], contract.dtype).reshape(contract.shape) for body in bodies]
    )
    answers, *by_webgpu = (
        Answers(np.ascontiguousarray(part[:, :-1]), np.ascontiguousarray(part[:, -1]))
        for part in np.split(numbers, num_answers, axis=1)
    )
    by_decoder = np.array([payload.content.startswith(_JPEG) for payload in talk.payloads])
    if not input_kind(contract.kind).has_pixels:
        by_decoder[:] = False
    differences = _row_differences(inputs, packed)
    problems = _preprocessing_problems(differences, by_decoder, rows.ids)
    facts: dict[str, Any] = {
        "browser": done["agent"],
        "webgpu": webgpu or "not executed: exported without --webgpu",
        "rows_with_equal_inputs": int((differences == 0).sum()),
    }
    if by_decoder.any():
        facts["jpeg"] = {
            "rows": int(by_decoder.sum()),
            "rows_that_differ": int((differences[by_decoder] > 0).sum()),
            "max_levels": float(differences[by_decoder].max()),
            "allowed_levels": MOST_LEVELS,
        }
        unequal = source.reference(packed).outputs
        thresholds = source.calibration.thresholds
        changed = flipped_rows(answers.outputs, unequal, (thresholds, thresholds))
        if len(changed):
            problems.append(f"{len(changed)} labels flipped, the first of {rows.ids[changed[0]]}")
    given = np.where(by_decoder.reshape(-1, *[1] * (packed.ndim - 1)), inputs, packed)
    found = TargetAnswers(answers, done["latency_ms"], done["rows_per_second"])
    hop = compare(source, NAME, requested, found, given)
    if problems:
        reason = "; ".join([*problems, *([hop.reason] if hop.reason else [])])
        hop = hop.model_copy(update={"status": "differs", "reason": reason})
    hops, requested = [hop], source.requested("browser", "webgpu")
    for other in by_webgpu:
        found = TargetAnswers(other, webgpu["latency_ms"], webgpu["rows_per_second"])
        hops.append(compare(source, WEBGPU, requested, found, given, is_other_runtime=True))
    if webgpu and not by_webgpu:
        hops.append(not_executed(WEBGPU, requested, webgpu["reason"]))
    return hops, facts


def _row_differences(found: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.float64]:
    """Return the largest difference in each row's input, (rows,)."""
    distances = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    return np.asarray(distances.reshape(len(distances), -1).max(axis=1))


def _preprocessing_problems(
    differences: NDArray[np.float64], by_decoder: NDArray[np.bool_], ids: list[str]
) -> list[str]:
    problems = []
    for what, rows, most in (
        ("rows", ~by_decoder, 0.0),
        ("JPEG rows", by_decoder, float(MOST_LEVELS)),
    ):
        beyond = np.flatnonzero(rows & ~(differences <= most))
        if len(beyond):
            worst = beyond[differences[beyond].argmax()]
            problems.append(
                f"preprocessing: {len(beyond)} of {rows.sum()} {what} became other inputs, by up "
                f"to {differences[worst]:g} in {ids[worst]}, expected at most {most:g}"
            )
    return problems


class _Handler(BaseHTTPRequestHandler):
    """Serves the page and the rows over HTTP, and receives the predictions."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each row waits 40 ms for an acknowledgement

    def __init__(self, folder: Path, talk: Conversation, *given: Any) -> None:
        self._folder = folder
        self._talk = talk
        super().__init__(*given)

    def do_GET(self) -> None:  # the base class's own name
        self._talk.last = time.monotonic()
        path = self.path.lstrip("/") or "index.html"
        if path == "hop/rows":
            content = {"rows": len(self._talk.payloads), "rounds": self._talk.rounds}
            self._send(json.dumps(content).encode(), "application/json")
        elif path.startswith("hop/row/"):
            row = int(path.removeprefix("hop/row/"))
            self._send(self._talk.payloads[row].content, "application/octet-stream")
        elif path == "hop.js":
            self._send((_PAGE / path).read_bytes(), "text/javascript")
        elif path == "certificate.js":
            self._send(_OFFER, "text/javascript")
        elif path == "index.html":
            self._send(self._page(), "text/html")
        elif "/" not in path and (self._folder / path).is_file():
            file = self._folder / path
            self._send(file.read_bytes(), _TYPES.get(file.suffix, "application/octet-stream"))
        else:
            self._send(b"", "text/plain", 404)

    def do_POST(self) -> None:  # the base class's own name
        body = self.rfile.read(int(self.headers["content-length"]))
        self._talk.last = time.monotonic()
        path = self.path
        if path.startswith("/hop/answer/"):
            self._talk.answers[int(path.removeprefix("/hop/answer/"))] = body
        elif path == "/hop/done":
            self._talk.done = json.loads(body)
            self._talk.ended.set()
        elif path == "/hop/fault":
            fault = json.loads(body)
            self._talk.fault, self._talk.hop = self._described(fault), fault["hop"]
            self._talk.ended.set()
        self._send(b"", "text/plain")

    def log_message(self, *_: Any) -> None:
        """Print no log line for the request."""

    def _described(self, fault: dict[str, Any]) -> str:
        if fault["row"] is None:
            return str(fault["message"])
        return f"row {self._talk.payloads[fault['row']].row_id}: {fault['message']}"

    def _page(self) -> bytes:
        """Return the page, which may connect to this server only, with the hop's script."""
        text = (self._folder / "index.html").read_text()
        text = text.replace("connect-src 'none'", "connect-src 'self'", 1)
        return text.replace("</head>", '<script src="hop.js" defer></script></head>', 1).encode()

    def _send(self, body: bytes, content_type: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.send_header("cache-control", "no-store")
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(body)


class _HopServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the browser may close a connection during a request."""


@contextmanager
def _serving(folder: Path, talk: Conversation) -> Iterator[str]:
    server = _HopServer(("127.0.0.1", 0), partial(_Handler, folder, talk))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _browsing(
    command: str, options: tuple[str, ...], url: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Open `url` in a new headless browser, whose processes end with the block."""
    # Chromium's sandbox refuses root, as whom containers run.
    flags = [*_FLAGS, *options, *["--no-sandbox"] * (os.geteuid() == 0)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [command, *flags, f"--user-data-dir={profile}", "--remote-debugging-port=0", url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
