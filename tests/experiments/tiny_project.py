"""A DVC project of two cheap stages with the real params.yaml, in a git repository of its own."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

_PIPELINE = """\
stages:
  train:
    cmd: python train.py
    params: [train.learning_rate, train.epochs]
    outs: [artifacts/model]
  evaluate:
    cmd: python evaluate.py
    deps: [artifacts/model]
    outs: [reports/evaluate.html]
    metrics:
      - metrics/evaluate.json: {cache: false}
"""
# Learns nothing: the "model" is the learning rate. It fails above 1, and waits for a file `go`.
_TRAIN = """\
import sys, time
from pathlib import Path
from ruamel.yaml import YAML
rate = YAML(typ="safe").load(Path("params.yaml"))["train"]["learning_rate"]
print("training with", rate)
Path("started").touch()
while Path("wait").exists():
    print(".")
    time.sleep(0.1)
if rate > 1:
    sys.exit("\\nerror: the loss is not finite, expected a number. Lower train.learning_rate.")
Path("artifacts").mkdir(exist_ok=True)
Path("artifacts/model").write_text(str(rate))
"""
_EVALUATE = """\
import json
from pathlib import Path
value = 1 - float(Path("artifacts/model").read_text())
metric = {"value": value, "low": value - 0.01, "high": value, "confidence": 0.95, "rows": 100}
loss = metric | {"name": "log_loss"}
Path("metrics").mkdir(exist_ok=True)
Path("reports").mkdir(exist_ok=True)
Path("reports/evaluate.html").write_text("<title>Evaluation</title>")
Path("metrics/evaluate.json").write_text(json.dumps({
    "metrics": [metric | {"name": "accuracy"}, loss],
    "baseline": [{"name": "accuracy", "value": 0.1}],
}))
"""
_AUTHOR = {
    f"GIT_{role}_{part}": "tiny@example.com"
    for role in ("AUTHOR", "COMMITTER")
    for part in ("NAME", "EMAIL")
}


@dataclass(frozen=True)
class TinyProject:
    """The project's folder and the command in it."""

    path: Path

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start `slipway ...`."""
        return subprocess.Popen(
            [sys.executable, "-m", "slipway.cli", *arguments],
            cwd=self.path,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def slipway(self, *arguments: str, code: int = 0) -> str:
        """Run `slipway ...`, which must end with `code`; return what it printed."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == code, output
        return output

    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of `slipway compare`, by name and newest first."""
        return {row["name"]: row for row in json.loads(self.slipway("compare", "--json"))}

    def git(self, *arguments: str) -> str:
        """Run git; return what it printed."""
        return subprocess.run(
            ["git", *arguments],
            cwd=self.path,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def environment(self) -> dict[str, str]:
        """The variables of every process in the project."""
        return {
            **os.environ,
            **_AUTHOR,
            "PYTHONPATH": str(ROOT),
            "DVC_SITE_CACHE_DIR": str(self.path / ".work/dvc"),
        }

    def wait_for(self, name: str) -> None:
        """Block until a stage has made a file, and remove it."""
        deadline = time.monotonic() + 120
        while not (self.path / name).exists():
            assert time.monotonic() < deadline, f"{name} was not made"
            time.sleep(0.05)
        (self.path / name).unlink()


def make_project(path: Path) -> TinyProject:
    """Make the project in an existing empty folder."""
    for name in ("params.yaml", "data/demo/digits.parquet"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, path / name)
    (path / "dvc.yaml").write_text(_PIPELINE)
    (path / "train.py").write_text(_TRAIN)
    (path / "evaluate.py").write_text(_EVALUATE)
    (path / ".gitignore").write_text("/.work\n/artifacts/\n/reports/\n/started\n/wait\n")
    (path / ".dvc").mkdir()
    (path / ".dvc/config").write_text("[core]\n    autostage = true\n    analytics = false\n")
    (path / ".dvc/.gitignore").write_text("/config.local\n/tmp\n/cache\n")
    (path / ".dvcignore").touch()
    project = TinyProject(path)
    project.git("init", "-q", "-b", "main")
    project.git("add", "-A")
    project.git("commit", "-q", "-m", "Start")
    return project
