"""A reader of a page, who runs its blocks in order and compares what they print.

A block of `bash` is run as it stands. A block of `python` is written to the file that its first
line names, or else run. A block without a language shows what the block before it prints: each of
its lines must be there, in order, apart from numbers; a line `...` stands for any lines. Other
blocks, such as `text`, are not compared. A command that starts a service goes on in a terminal of
its own, and a request that is refused ends the test, unless the page shows the refusal.

`python -m tests.end_to_end.pages PAGE COMMAND LOG` compares what a page shows of a command that no
test may run, such as `make demo`, with the output in a file.
"""

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import ROOT
from tests.end_to_end.project import wait_until_live, wait_until_ready
from tests.serving.server import free_port

# What no page runs, with the reason; the names are the first words of a command.
NOT_RUN = {
    "make demo": ".ci/run runs it and compares its output",
    "make test": ".ci/run runs it, this test included",
    "make nightly": "it takes hours",
    "make install": ".ci/run runs it",
    "pip install": "`make release` installs the wheel in an empty environment",
    "uv pip install": "`make release` installs the wheel in an empty environment",
    "docker": "tests have no Docker daemon",
    "sbatch": "tests have no Slurm; tests/search runs the same processes",
}
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_SERVER = re.compile(r"\b(slipway serve|slipway run\b.* --serve|make serve|bentoml serve)\b")
_FILE = re.compile(r"^# ([\w./-]+\.py)$", re.MULTILINE)
_SHOWN_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d{4}\b")
# The quickest certified precision is served, which depends on the machine.
_MEASURED = re.compile(r"(?<=-> cpu )\w+|[-+]?\d[\d.,]*(e[-+]?\d+)?( [kMG]?B\b)?")
_STATUS_OF_CURL = 22
_LONGEST_RUN_S = 1200.0  # before its service starts
# Refusals end a block, as an error does. A block goes on in the folder and with the variables in
# which the one before it ended.
_BEGIN = """\
curl() {{ command curl --silent --show-error --fail-with-body "$@"; }}
[ ! -f {state} ] || . {state}
"""
_KEEP = """trap '{{ export -p; printf "cd %q\\n" "$PWD"; }} > {state}' EXIT\n"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """List the fenced blocks, also those of a numbered step."""
    return [Block(language, textwrap.dedent(text)) for _, language, text in _FENCE.findall(page)]


def _lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def _is_not_run(line: str) -> bool:
    return line.startswith(tuple(NOT_RUN))


def missing(shown: str, said: str) -> list[str]:
    """Return the lines of `shown` that `said` lacks, in order, apart from numbers and line ends."""
    text, place, lacking = _plain(said), 0, []
    for line in filter(None, map(_plain, shown.splitlines())):
        found = place if line == "..." else text.find(line, place)
        if found < 0:
            lacking.append(line)
        else:
            place = found + (0 if line == "..." else len(line))
    return lacking


def _plain(text: str) -> str:
    return " ".join(_MEASURED.sub("#", text).split())


@dataclass
class Reader:
    """Follows pages in a folder, with the given variables."""

    folder: Path
    environment: dict[str, str]
    said: str = ""  # of the last block
    _is_whole: bool = True  # no command of the last block was left out
    _services: dict[str, tuple[str, Callable[[], object]]] = field(default_factory=dict)

    def follow(self, page: str) -> str:
        """Run all blocks; return what they printed."""
        said: list[str] = []
        lacking: list[str] = []
        try:
            for block, following in itertools.pairwise([*blocks_of(page), Block("", "")]):
                if block.language == "bash":
                    self.run(block.text, may_be_refused=not following.language)
                elif block.language == "python":
                    self.python(block.text)
                elif not block.language and self._is_whole:
                    lacking += missing(block.text, self.said)
                if block.language in ("bash", "python"):
                    said.append(self.said)
        finally:
            for _, end in self._services.values():
                end()
            self._services.clear()
        assert lacking == [], "\n".join(["shown, but not printed:", *lacking, *said])
        return "\n".join(said)

    def python(self, text: str) -> None:
        """Write the file that the first line names, or run the text."""
        if name := _FILE.match(text):
            (self.place() / name[1]).parent.mkdir(parents=True, exist_ok=True)
            (self.place() / name[1]).write_text(text)
        else:
            self.run(f"python -c {shlex.quote(text)}")

    def run(self, text: str, *, may_be_refused: bool = False) -> None:
        """Run the commands in one shell after the other, with a service beside them."""
        self.said = ""
        lines: list[str] = []
        self._is_whole = not any(map(_is_not_run, _lines(text)))
        for line in _lines(text):
            if _is_not_run(line):
                continue
            if _SERVER.search(line.partition(" #")[0]):
                self._shell(lines)
                lines = []
                self._start(line.partition(" #")[0])
            else:
                lines.append(line)
        self._shell(lines, may_be_refused=may_be_refused)

    def _shell(self, lines: list[str], *, may_be_refused: bool = False) -> None:
        for shown, (port, _) in self._services.items():
            lines = [re.sub(rf"(?<=127\.0\.0\.1:){shown}\b", port, line) for line in lines]
        if not any(line.strip() for line in lines):
            return
        done = subprocess.run(
            ["bash", "-ec", self._script(_BEGIN + _KEEP) + "\n".join(lines)],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said += done.stdout
        accepted = (0, _STATUS_OF_CURL) if may_be_refused else (0,)
        assert done.returncode in accepted, "\n".join([*lines, self.said])

    def _start(self, line: str) -> None:
        """Start a service on a free port, in place of a former one on the same."""
        named = re.search(r"--port[ =](\d+)", line)
        shown, port = named[1] if named else "3000", str(free_port())
        if shown in self._services:
            self._services.pop(shown)[1]()
        command = re.sub(r"(--port[ =])\d+", rf"\g<1>{port}", line)
        log = self.folder / "service.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-ec", self._script(_BEGIN) + command],
                cwd=self.folder,
                env={**self.environment, "BENTOML_PORT": port, "SLIPWAY_DRAIN_S": "0"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)

        self._services[shown] = (port, end)
        wait_until_live(f"http://127.0.0.1:{port}", process, log, timeout_s=_LONGEST_RUN_S)
        wait_until_ready(f"http://127.0.0.1:{port}")
        self.said += log.read_text()

    @property
    def _state(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.shell")

    def _script(self, template: str) -> str:
        return template.format(state=shlex.quote(str(self._state)))

    def place(self) -> Path:
        """Return the folder in which the last shell ended."""
        if not self._state.is_file():
            return self.folder
        return Path(shlex.split(self._state.read_text().splitlines()[-1])[1])


def reader(folder: Path, home: Path, scripts: Path, **variables: str) -> Reader:
    """A reader with an empty home and the commands of an environment before the system's."""
    home.mkdir()
    folder.mkdir(exist_ok=True)
    own = (Path(sys.prefix) / "bin").resolve()
    kept = (path for path in os.environ["PATH"].split(os.pathsep) if Path(path).resolve() != own)
    return Reader(
        folder,
        {
            "PATH": os.pathsep.join([str(scripts), *kept]),
            "HOME": str(home),
            "LANG": "C.UTF-8",
            "GIT_CEILING_DIRECTORIES": str(folder.parent),  # the checkout ignores its own tmp/
            **variables,
        },
    )


def install_wheel(folder: Path) -> Path:
    """Build the wheel and install it into a new environment; return the folder of its commands.

    What the wheel requires is found in the environment of the tests, which has no code of ours but
    a path to the checkout that only its own interpreter reads.
    """
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run([*build, "--directory", folder / "dist"], cwd=ROOT, check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    uv, environment = f"{sys.prefix}/bin/uv", folder / "environment"
    python = environment / "bin/python"
    quiet = (uv, "--quiet", "--offline")
    subprocess.run([*quiet, "venv", "--python", sys.executable, environment], check=True)
    install = (*quiet, "pip", "install", "--python", python, "--no-deps", wheel)
    subprocess.run(install, check=True)
    (site,) = environment.glob("lib/python3.*/site-packages")
    (others,) = Path(sys.prefix).glob("lib/python3.*/site-packages")
    (site / "required.pth").write_text(f"{others}\n")
    for name in ("dvc", "bentoml"):
        script = environment / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{python}" -m {name} "$@"\n')
        script.chmod(0o755)
    return environment / "bin"


def compare_with_log(page: Path, command: str, log: Path) -> str:
    """Return what the page shows of the command and the log lacks, as a message."""
    blocks = blocks_of(page.read_text())
    shown = [
        after.text
        for before, after in itertools.pairwise(blocks)
        if command in before.text and not after.language
    ]
    if not shown:
        return f"{page} shows no output of {command}"
    lacking = [line for text in shown for line in missing(text, log.read_text())]
    return "".join(f"{page} shows, but {command} did not print: {line}\n" for line in lacking)


if __name__ == "__main__":
    sys.exit(compare_with_log(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])) or None)
