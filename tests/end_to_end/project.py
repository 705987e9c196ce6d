"""A copy of the checkout in an empty folder, with 64 small pictures, to be used as a user would."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from ruamel.yaml import YAML

from slipway.config.params import filled, value_at
from slipway.system.environment import FOLDERS
from tests import plain_http
from tests.conftest import ROOT
from tests.project_params import of_kind
from tests.serving.server import free_port

SHAPES = ("circle", "cross", "ring", "square")
NUM_IMAGES = 64
START_TIMEOUT_S = 60.0
RUN_STAGES = """\
import runpy
import sys

sys.path[0] = ""
for stage in sys.argv[1:]:
    runpy.run_module(f"slipway.stages.{stage}", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Project:
    """A project folder and the ways into it."""

    path: Path

    def shell(self, line: str, *, succeeds: bool = True, timeout_s: float = 600) -> str:
        """Run one line in a fresh shell with `.venv` active; return what it printed."""
        answer = subprocess.run(
            ["bash", "-c", f"source .venv/bin/activate && {line}"],
            cwd=self.path,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert (answer.returncode == 0) is succeeds, (
            f"{line} ended with {answer.returncode}:\n{answer.stdout}"
        )
        return answer.stdout

    def run_stages(self, stages: Iterable[str]) -> str:
        """Run stages in one process, which imports torch only once; return what they printed."""
        (self.path / ".work/run_stages.py").write_text(RUN_STAGES)
        return self.shell(f"python .work/run_stages.py {' '.join(stages)}")

    def environment(self) -> dict[str, str]:
        """The caller's variables, with a home that must stay empty and an author for commits.

        Python writes bytecode, as it does for users.
        """
        author = {
            f"GIT_{role}_{part}": "end-to-end"
            for role in ("AUTHOR", "COMMITTER")
            for part in ("NAME", "EMAIL")
        }
        own = ("PYTHONDONTWRITEBYTECODE", *FOLDERS)  # those of the checkout are not the copy's
        inherited = {name: value for name, value in os.environ.items() if name not in own}
        return {
            **inherited,
            **author,
            **self.loopback_only(),
            "HOME": str(self.path / ".work" / "home"),
        }

    def loopback_only(self) -> dict[str, str]:
        """Variables that limit a process to loopback and log other attempts in `network_log`.

        Empty if there was no C compiler to build the library.
        """
        library = self.path / ".work" / "only_loopback.so"
        return (
            {"LD_PRELOAD": str(library), "ONLY_LOOPBACK_LOG": str(self.network_log)}
            if library.is_file()
            else {}
        )

    @property
    def network_log(self) -> Path:
        """One line `pid program call address` for each attempt to leave this machine."""
        return self.path / ".work" / "network.log"

    def set_params(self, changes: dict[str, dict[str, Any]]) -> None:
        """Change keys of params.yaml, section by section."""
        content = self._read_params()
        for section, values in changes.items():
            content.setdefault(section, {}).update(values)
        self._write_params(content)

    def keep_own_keys(self) -> None:
        """Remove the keys of params.yaml that only another kind of input has."""
        content = self._read_params()
        self._write_params(of_kind(content, content["data"]["task"]))

    def set_value(self, key: str, value: Any) -> None:
        """Change one key of params.yaml, such as "clean.rules.blurred"."""
        content = self._read_params()
        *sections, name = key.split(".")
        assert value_at(filled(content), key) != value, f"{key} is {value} already"
        section = content
        for place in sections:
            section = section.setdefault(place, {})
        section[name] = value
        self._write_params(content)

    def _read_params(self) -> dict[str, Any]:
        """Read params.yaml as DVC and the stages do, as YAML 1.2: `off` is text."""
        content: dict[str, Any] = YAML(typ="safe", pure=True).load(self.path / "params.yaml")
        return content

    def _write_params(self, content: dict[str, Any]) -> None:
        YAML(typ="safe", pure=True).dump(content, self.path / "params.yaml")

    @contextlib.contextmanager
    def service(self, line: str = "bentoml serve", **settings: str) -> Iterator[str]:
        """Run the service in a process of its own and yield its address."""
        port = free_port()
        log = self.path / ".work" / "service.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"source .venv/bin/activate && exec {line} --port {port}"],
                cwd=self.path,
                env={**self.environment(), "SLIPWAY_DRAIN_S": "0", **settings},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                address = f"http://127.0.0.1:{port}"
                wait_until_live(address, process, log)
                yield address
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=30)


def shown_params() -> list[dict[str, dict[str, Any]]]:
    """The changes of params.yaml in a page: for small photographs, and for the embedded table."""
    page = (ROOT / "docs/how-to/new_project.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    small, table = (YAML(typ="safe", pure=True).load(block) for block in blocks)
    return [small, table]


def wait_until_ready(address: str) -> None:
    """Block until /readyz answers 200; fails with its last answer."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while (answer := plain_http.get(f"{address}/readyz")).status_code != 200:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.1)


def wait_until_live(
    address: str,
    process: subprocess.Popen[bytes],
    log: Path,
    timeout_s: float = START_TIMEOUT_S,
) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            if plain_http.get(f"{address}/livez").status_code == 200:
                return
        time.sleep(0.1)


def copy_checkout(target: Path) -> Project:
    """Copy the checkout's tracked and new files and commit them to a new repository.

    Stages that ran in the checkout are not recorded in the copy, or a stage that runs there without
    DVC would contradict the record. This environment is linked as its .venv. Its first stages start
    sooner if the checkout has compiled code and digests of its modules, such as after `make demo`.
    """
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file() and name != "dvc.lock":
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    # Python compares compiled code by size and time of its source, and the digests are by content.
    known = [ROOT / ".work/code.json", *ROOT.glob("slipway/**/__pycache__/*.pyc")]
    for path in filter(Path.is_file, known):
        copy = target / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    (target / ".venv").symlink_to(sys.prefix)
    (target / ".work" / "home").mkdir(parents=True, exist_ok=True)
    if compiler := shutil.which("cc"):
        library = target / ".work" / "only_loopback.so"
        source = Path(__file__).with_name("only_loopback.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    project = Project(target)
    project.shell("git init -q && git add -A && git commit -qm 'A new project'")
    return project


def copy_finished(finished: Project, target: Path) -> Project:
    """Copy a project after `dvc repro`, free to change, and commit what its stages wrote."""
    project = Project(shutil.copytree(finished.path, target, symlinks=True, dirs_exist_ok=True))
    project.shell("git add -A && git commit -qm 'A first model'")
    return project


def draw_shapes(folder: Path) -> None:
    """64 noisy grey pictures of 20x20 pixels in one sub-folder per shape."""
    generator = np.random.default_rng(5)
    for number in range(NUM_IMAGES):
        shape = SHAPES[number % len(SHAPES)]
        pixels = _shape_mask(shape, generator.integers(-2, 3, size=2)) * 180.0 + generator.uniform(
            0, 60, size=(20, 20)
        )
        (folder / shape).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / shape / f"{number:02}.png")


def _shape_mask(shape: str, offset: Any) -> Any:
    rows, columns = np.mgrid[-10:10, -10:10] + 0.5
    rows, columns = rows - offset[0], columns - offset[1]
    radius = np.hypot(rows, columns)
    if shape == "circle":
        return radius < 6
    if shape == "ring":
        return (radius < 7) & (radius > 4)
    if shape == "square":
        return np.maximum(abs(rows), abs(columns)) < 6
    return np.minimum(abs(rows), abs(columns)) < 2
