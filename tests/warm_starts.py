"""Runs `python -m MODULE` in a fork of a process that has already imported the training libraries.

Each start saves 8 seconds of imports. Otherwise these processes are real: they have their own
working folder, variables, output, session, signals and exit code. A second rank that Lightning
starts is also a process of its own, a child of the first one. To test imports or the command line,
start processes with `subprocess`, as launchers and users do.

`python -m tests.warm_starts SOCKET` is the server that forks. It has one Python thread and ends
when its socket is closed.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Self

from slipway.kinds.code_digest import stage_digest, stage_names

ROOT = Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1
_PRELOADED = (
    "slipway.training.job",
    "slipway.training.run",
    "slipway.config.stage_run",
    "slipway.config.params",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "dvc.cachemgr",
    "dvc.data_cloud",
    "dvc.lock",
    "dvc.repo",
    "dvc.repo.experiments",
    "dvclive.lightning",
    "hydra.core.hydra_config",
    "omegaconf",
    "pyarrow.dataset",
    "pytorch_lightning.strategies.launchers.subprocess_script",
    "safetensors.torch",
    "scmrepo.git",
    "setuptools",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "torch.utils.serialization",
    "torch.utils.tensorboard",
)
_MAX_BYTES = 1 << 20  # of a job, mostly environment variables


@dataclass(frozen=True)
class Job:
    """A command for a forked process, with its folder and variables."""

    command: list[str]  # a module and its arguments
    folder: str
    variables: dict[str, str]
    new_session: bool = False


class Process:
    """A process forked by the server, with the members of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        variables: dict[str, str],
        stdout: int,
        stderr: int,
        new_session: bool,
    ) -> None:
        self.args = command
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None
        status, report = os.pipe()
        reading, writing = os.pipe() if stdout == subprocess.PIPE else (None, stdout)
        job = Job(command, str(folder.resolve()), variables, new_session)
        _server().send(job, [writing, writing if stderr == subprocess.STDOUT else stderr, report])
        os.close(report)
        if reading is not None:
            os.close(writing)
            self.stdout = os.fdopen(reading, encoding="utf-8")
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = int(self._next_number())

    def _next_number(self) -> str:
        text = b""
        while not text.endswith(b"\n"):
            byte = self._status.read(1)
            assert byte, "the process that is forked has ended"
            text += byte
        return text.decode()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process; return its exit code, or minus the signal."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._next_number())
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.stdout:
            self.stdout.close()
        self.wait()


def start(
    command: list[str], folder: Path, variables: dict[str, str], stderr: int = subprocess.DEVNULL
) -> Process:
    """Run a module and its arguments in a session of its own, with an output that can be read."""
    with open(os.devnull, "wb") as nothing:
        return Process(
            command,
            folder,
            variables,
            subprocess.PIPE,
            nothing.fileno() if stderr == subprocess.DEVNULL else stderr,
            True,
        )


def run(
    command: list[str],
    folder: Path,
    variables: dict[str, str],
    timeout: float,
    stderr: int = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Run a module and its arguments to the end."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        both = stderr == subprocess.STDOUT
        process = Process(
            command,
            folder,
            variables,
            said.fileno(),
            stderr if both else complained.fileno(),
            False,
        )
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        said.seek(0), complained.seek(0)
        return subprocess.CompletedProcess(
            command, code, said.read().decode(), complained.read().decode()
        )


class _Server:
    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (self._ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
            command = [sys.executable, "-m", "tests.warm_starts", str(theirs.fileno())]
            # DeepSpeed's import looks for GPUs. Through NVML, CUDA stays usable in forks.
            variables = {
                **os.environ,
                "PYTHONPATH": f"/tmp/gpulike:{ROOT}",
                "DS_BUILD_OPS": "0",
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            }
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables,
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self.end)

    def send(self, job: Job, descriptors: list[int]) -> None:
        socket.send_fds(self._ours, [json.dumps(asdict(job)).encode()], descriptors)

    def end(self) -> None:
        self._ours.close()
        self._process.wait()


_servers: list[_Server] = []
_exit_codes: list[int] = []  # of this process, once it is forked and what it runs has ended


def _server() -> _Server:
    """The process that is forked, started when it is first needed."""
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


def _preload() -> None:
    """Import what trainings import, some of it only while they run."""
    for module in _PRELOADED:
        importlib.import_module(module)
    for stage in stage_names(ROOT):  # reads the code once for all
        stage_digest(ROOT, stage)
    gc.freeze()  # or each collection in a forked process would copy all that is shared


def _serve(control: socket.socket) -> Job:
    """Fork for each job that comes; returns in the new process, ready to run it."""
    while True:
        text, descriptors, _, _ = socket.recv_fds(control, _MAX_BYTES, 3)
        if not text:
            os._exit(0)
        if not os.fork():
            control.close()
            job = Job(**json.loads(text))
            _fork_and_report(descriptors.pop())
            _become(job, descriptors)
            return job
        for descriptor in descriptors:
            os.close(descriptor)
        _forget_ended()


def _forget_ended() -> None:
    with suppress(ChildProcessError):  # none is left
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def _fork_and_report(report: int) -> None:
    """Return in a child; its parent writes the child's id and exit code to `report`, and exits."""
    child = os.fork()
    if child:
        # Only `report` stays open, so that a reader of the child's output sees its end.
        for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - {report}:
            with suppress(OSError):  # of the list itself
                os.close(descriptor)
        os.write(report, b"%d\n" % child)
        os.write(report, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.close(report)


def _become(job: Job, descriptors: list[int]) -> None:
    """Adopt the folder, variables and output of a job."""
    if job.new_session:
        os.setsid()
    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(job.folder)
    _take_variables(job.variables)


def _take_variables(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    from lightning_fabric.utilities import rank_zero

    rank = rank_zero._get_rank() or 0
    setattr(rank_zero.rank_zero_only, "rank", rank)  # noqa: B010 - as its import does


def _run(job: Job) -> None:
    """Run the job's module as `python -u -m` does."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.argv, sys.path[0] = job.command, job.folder
    try:
        runpy.run_module(job.command[0], run_name="__main__", alter_sys=True)
        _exit_codes.append(0)
    except SystemExit as end:
        _exit_codes.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except Exception:
        _exit_codes.append(1)
        raise


def _leave() -> None:
    """End at exit without tearing down modules, which would copy the shared memory of a fork."""
    if _exit_codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[0])


class _Rank:
    """The second process of a training, which waits until Lightning starts it."""

    def __init__(self, pid: int, begin: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._begin, self._lock = begin, threading.Lock()

    def start(self, command: list[str], env: dict[str, str], cwd: str | None) -> Self:
        """Replace Lightning's call of `Popen` for `python -m MODULE`."""
        assert (command[:2], cwd) == ([sys.executable, "-m"], None), command
        os.write(self._begin, json.dumps(asdict(Job(command[2:], os.getcwd(), env))).encode())
        os.close(self._begin)
        return self

    def poll(self) -> int | None:
        """Return its exit code if it has ended."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process; return its exit code."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("rank 1", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self.send_signal(signal.SIGKILL)


def _fork_second_rank() -> Job | None:
    """Fork a child early, which Lightning later starts as rank 1.

    Returns the child's job in the child, and None in this process.
    """
    from pytorch_lightning.strategies.launchers import subprocess_script

    waiting, begin = os.pipe()
    first = os.getpid()
    pid = os.fork()
    if pid:
        os.close(waiting)
        stand_in = SimpleNamespace(Popen=_Rank(pid, begin).start)
        setattr(subprocess_script, "subprocess", stand_in)  # noqa: B010
        return None
    os.close(begin)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != first:
        os._exit(0)
    with open(waiting, "rb") as file:
        text = file.read()
    if not text:
        os._exit(0)
    prctl(_PR_SET_PDEATHSIG, 0)
    job = Job(**json.loads(text))
    _take_variables(job.variables)
    return job


def _main(control: socket.socket) -> None:
    atexit.register(_leave)  # before any other, so that it comes after them
    _preload()
    job = _serve(control)
    _run(_fork_second_rank() or job)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
