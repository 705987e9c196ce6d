"""Runs `dvc repro` as a child process: shows and logs its output, and passes signals on.

The log has all of it. The screen has what the stages print, and of DVC only warnings and errors.

DVC and its stages form a process group of their own. This process receives the signals and passes
them on, so a stage receives each signal exactly once.
"""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType

from slipway.experiments.repository import dvc_environment

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CHUNK, _TAIL = 1 << 16, 1 << 18  # bytes
_POLL_S = 0.2
# What DVC says while all is well. A line that it words differently would be shown.
_OF_DVC = re.compile(
    rb"Running stage '(?P<stage>.+)':"
    rb"|(?:Generating|Updating) lock file '.+'"
    rb"|Stage '.+' (?:didn't change, skipping|is cached - skipping run, checking out outputs)"
    rb"|'.+' didn't change, skipping"
    rb"|Use `dvc push` to send your updates to remote storage\."
)
_LINE_END = re.compile(rb"(?<=\n)|(?<=\r)(?!\n)")  # a bar on a terminal ends with \r


@dataclass
class Reproduction:
    """A `dvc repro` and its end."""

    log: Path
    is_quiet: bool = False  # its output goes only into the log
    exit_code: int = -1
    signals: list[int] = field(default_factory=list)  # that reached this process
    output: str = ""  # the end of it
    stage_seconds: dict[str, float] = field(default_factory=dict)  # of the stages that have ended

    def run(self, stage: str | None, started: Callable[[int], None]) -> None:
        """Run the stages up to `stage`, or all; call `started` with the process group's id."""
        reader, writer = _channel()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb", buffering=0) as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "dvc", "repro", *([stage] if stage else [])],
                    env=dvc_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=writer,
                    stderr=writer,
                    process_group=0,
                )
                os.close(writer)
                with self._signals_to(process):
                    started(process.pid)
                    tail, screen = b"", Screen()
                    for chunk in _chunks(reader, process):
                        shown = screen.shown(chunk)
                        if not self.is_quiet:
                            sys.stdout.buffer.write(shown)
                            sys.stdout.flush()
                        log.write(chunk)
                        tail = (tail + chunk)[-_TAIL:]
                    self.exit_code = process.wait()
        finally:
            os.close(reader)
        self.output = tail.decode(errors="replace")
        ends = [*screen.starts.values(), *([time.monotonic()] if self.exit_code == 0 else [])]
        seconds = [round(end - start, 1) for start, end in pairwise(ends)]
        self.stage_seconds = dict(zip(screen.starts, seconds, strict=False))

    @contextlib.contextmanager
    def _signals_to(self, process: "subprocess.Popen[bytes]") -> Iterator[None]:
        """Pass signals on to the process group in the block; the second signal kills it."""

        def forward(number: int, _: FrameType | None) -> None:
            self.signals.append(number)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number if len(self.signals) == 1 else signal.SIGKILL)

        before = {number: signal.signal(number, forward) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Screen:
    """The part of the output that a user sees: a line `[STAGE]`, then what this stage prints."""

    def __init__(self) -> None:
        self._rest = b""  # the begin of a line
        self._is_dvc = True  # the last line was DVC's
        self.starts: dict[str, float] = {}  # monotonic time by stage, in their order

    def shown(self, chunk: bytes) -> bytes:
        """Return what to show after `chunk`; an empty one says that nothing follows soon."""
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        if not chunk:
            lines, self._rest = [self._rest], b""
        return b"".join(self._line(line) for line in lines)

    def _line(self, line: bytes) -> bytes:
        text = line.strip()
        found = _OF_DVC.fullmatch(text)
        # DVC prints the stage's command below its name, and a blank line after each stage.
        self._is_dvc = bool(found or (self._is_dvc and (not text or text.startswith(b"> "))))
        if found and found["stage"]:
            self.starts[found["stage"].decode(errors="replace")] = time.monotonic()
            if found["stage"] != b"code":  # it runs each time, for a moment
                return b"[" + found["stage"] + b"]\n"
        return b"" if self._is_dvc else line


def is_running(group: int) -> bool:
    """Return True if the group of an earlier `dvc repro` still has its DVC."""
    try:
        return b"dvc" in Path(f"/proc/{group}/cmdline").read_bytes()
    except OSError:
        return False


def _channel() -> tuple[int, int]:
    """Return (reader, writer) of a pipe, or of a pseudoterminal if this process has a terminal.

    On a pseudoterminal DVC prints progress bars and colours.
    """
    if not sys.stdout.isatty():
        return os.pipe()
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, termios.tcgetwinsize(sys.stdout.fileno()))
    return reader, writer


def _chunks(reader: int, process: "subprocess.Popen[bytes]") -> Iterator[bytes]:
    """Yield output until the process has ended and everything is read; b"" at each pause."""
    while True:
        has_ended = process.poll() is not None
        if not select.select([reader], [], [], 0 if has_ended else _POLL_S)[0]:
            yield b""
            if has_ended:  # a process that it left behind may hold the other end
                return
            continue
        try:
            chunk = os.read(reader, _CHUNK)
        except OSError:  # a terminal without processes
            chunk = b""
        if chunk:
            yield chunk
        else:
            process.wait()
            yield b""
            return
