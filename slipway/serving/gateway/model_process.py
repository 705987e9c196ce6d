"""Runs the service of one model as a child process, and restarts it when it ends."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque

import aiohttp
import psutil

from slipway.serving.gateway.models_file import HostedModel
from slipway.serving.process.addresses import free_port
from slipway.serving.settings import PREFIX

logger = logging.getLogger("slipway.gateway")
FIRST_DELAY_S, LAST_DELAY_S = 1.0, 60.0  # pauses before the next start
STEADY_S = 60.0  # a service that ran so long is started again after the first delay
MEMORY_CHECK_S = 5.0
STOP_S = 20.0  # from SIGTERM to SIGKILL, in addition to the time for draining
COMMAND_S = 600.0  # longest command of a rollout; equal to its PREPARE_S
PATIENCE_S = 5.0  # in addition to the service's own deadline
_REASON_LINES = 3
_LAST = 19  # the highest niceness of the system


class ModelProcess:
    """Starts, watches and stops the service of one model. All on one event loop."""

    def __init__(self, model: HostedModel, *, has_grpc: bool = False) -> None:
        self.model, self._has_grpc = model, has_grpc
        self.port = self.grpc_port = 0  # chosen at each start
        self.reason = "it is starting"  # why there is no answer, if there is none
        self.num_restarts = 0
        self.memory_bytes = 0
        self.num_requests = 0  # requests that it is answering now
        self._session: aiohttp.ClientSession | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        """The URL at which the service receives requests of callers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def grpc_address(self) -> str:
        """The address at which the service receives calls of gRPC."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def operators_address(self) -> str:
        """The URL at which the service receives requests of operators."""
        settings = self.model.settings
        if not settings.admin_port:
            return self.address
        host = settings.admin_host
        return f"http://{f'[{host}]' if ':' in host else host}:{settings.admin_port}"

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP session for requests to the service. Read it on the event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # the gateway refuses, it does not wait
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            )
        return self._session

    def patience(self, method: str, path: str) -> aiohttp.ClientTimeout:
        """Return the time limits of a request: a command of a rollout waits for its rehearsal."""
        is_command = (method, path) == ("POST", "/rollout")
        seconds = COMMAND_S if is_command else self.model.settings.request_timeout_s
        return aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=seconds + PATIENCE_S)

    async def is_ready(self) -> bool:
        """Send a readiness probe, and return True if the service reports that it is ready."""
        quickly = aiohttp.ClientTimeout(total=1.0)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self.session.get(f"{self.address}/readyz", timeout=quickly) as answer:
                return answer.ok
        return False

    async def close(self) -> None:
        """Close the connections to the service."""
        if self._session:
            await self._session.close()

    async def run(self) -> None:
        """Run the service until this coroutine is cancelled, then stop it."""
        delay = FIRST_DELAY_S
        clock = asyncio.get_running_loop().time
        try:
            while True:
                started = clock()
                self.reason = await self._run_once()
                logger.error(
                    "model %s ended: %s; restarting it in %g s",
                    *(self.model.name, self.reason, delay),
                )
                await asyncio.sleep(delay)
                delay = FIRST_DELAY_S if clock() - started > STEADY_S else delay * 2
                delay = min(delay, LAST_DELAY_S)
                self.num_restarts += 1
        finally:
            await self._stop()
            await self.close()

    async def _run_once(self) -> str:
        """Start the service and wait until it ends. Returns the reason."""
        # Another program may take the port before the service does. It then ends, and its next
        # start has another port.
        self.port = free_port()
        command = (
            *(sys.executable, "-m", "slipway.system.parent_death", str(os.getpid())),
            *(sys.executable, "-m", "slipway.cli", "serve", "--port", str(self.port)),
        )
        # In the folder of the model, so that serving.env and relative paths are its own.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(PREFIX)
        }
        environment[f"{PREFIX}MODEL_NAME"] = self.model.name
        if self._has_grpc:
            self.grpc_port = free_port()
            environment |= {
                f"{PREFIX}GRPC_PORT": str(self.grpc_port),
                f"{PREFIX}GRPC_HOST": "127.0.0.1",
            }
        self._process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.model.folder,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # so that its workers can be killed with it
        )
        last: deque[str] = deque(maxlen=_REASON_LINES)
        if self.model.niceness:  # its workers inherit it
            niceness = os.getpriority(os.PRIO_PROCESS, 0) + self.model.niceness
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, min(niceness, _LAST))
        watch = asyncio.create_task(self._watch_memory(last))
        assert self._process.stdout
        try:
            await self._forward(self._process.stdout, last)
            code = await self._process.wait()
        finally:
            watch.cancel()
        self.memory_bytes = 0
        return f"its service ended with exit code {code}: {' '.join(last) or 'it said nothing'}"

    async def _forward(self, output: asyncio.StreamReader, last: deque[str]) -> None:
        """Print the service's output, each line with the name of the model in front."""
        while line := await _next_line(output):
            if not (text := line.decode(errors="replace").rstrip()):
                continue
            last.append(text)
            print(f"[{self.model.name}] {text}", file=sys.stderr, flush=True)

    async def _watch_memory(self, last: deque[str]) -> None:
        """End the service if its processes use more memory than the model's limit."""
        assert self._process
        limit = self.model.max_memory_bytes
        while True:
            await asyncio.sleep(MEMORY_CHECK_S)
            self.memory_bytes = await asyncio.to_thread(memory_of, self._process.pid)
            if limit is not None and self.memory_bytes > limit:
                logger.error(
                    "model %s needs %d MiB, above max_memory_mib = %d; restarting it",
                    *(self.model.name, self.memory_bytes >> 20, limit >> 20),
                )
                await self._stop()
                last.append("it needed more memory than max_memory_mib")
                return

    async def _stop(self) -> None:
        """Let the service finish its requests; kill its processes if they do not end in time."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(self.model.settings.drain_s + STOP_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def memory_of(pid: int) -> int:
    """Return the memory of a process and its descendants in bytes; shared pages count once."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                details = process.memory_full_info()
                total += getattr(details, "pss", details.uss)  # pss: on Linux
    return total


async def _next_line(output: asyncio.StreamReader) -> bytes:
    """Return the next line of `output`, or a part of a very long line; b"" at the end."""
    try:
        return await output.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await output.read(max(1, error.consumed))
