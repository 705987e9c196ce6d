"""A DVC project whose training is a formula, with real checkpoints' descriptions, for searches.

The score after epoch e is 1 - |rate - 0.3| - 0.1/e, so 0.3 is the best learning rate. Each epoch
and each run of the stage `clean` is a line of the file that COUNTS names.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.experiments.tiny_project import TinyProject, make_project

COUNTS = "counts.log"  # beside the project
SECTION = """
search:
  method: {method}
  metric: accuracy
  direction: maximize
  budget: {{ trials: {trials}, epochs: null, minutes: null }}
  halving: {halving}
  workers: {workers}
  seed: 3
  space:
    train.learning_rate: {{ {values} }}
"""
_PIPELINE = """\
stages:
  clean:
    cmd: python clean.py
    deps: [data/demo/digits.parquet]
    outs: [data/clean]
  train:
    cmd: python train.py
    params: [train.learning_rate, train.epochs]
    deps: [data/clean, extra.py]
    outs: [artifacts/model]
    metrics:
      - metrics/train.json: {cache: false}
  evaluate:
    cmd: python evaluate.py
    deps: [artifacts/model]
    outs: [reports/evaluate.html]
    metrics:
      - metrics/evaluate.json: {cache: false}
"""
_CLEAN = """\
from pathlib import Path
with open(COUNTS, "a") as counts:
    print("clean", file=counts)
Path("data").mkdir(exist_ok=True)
Path("data/clean").write_text("clean")
"""
# It fails for rates above 1, and is killed once for the rate in the file `kill`.
_TRAIN = """\
import json, os, signal, sys, time
from pathlib import Path
from ruamel.yaml import YAML
import extra
params = YAML(typ="safe").load(Path("params.yaml"))["train"]
rate, epochs = params["learning_rate"], params["epochs"]
pause = int(os.environ.get("TRAIN_PAUSE_AFTER_EPOCH", 0))
work = Path(".work/train/fingerprint")
def path(epoch):
    return work / f"step-{epoch:08d}-epoch-{epoch:06d}" / "checkpoint.json"
history = []
for saved in sorted(work.glob("step-*/checkpoint.json")):
    history = json.loads(saved.read_text())["history"]
if rate > 1:
    sys.exit("\\nerror: the loss is not finite, expected a number. Lower train.learning_rate.")
while len(history) < epochs:
    epoch = len(history) + 1
    time.sleep(extra.SECONDS)
    score = 1 - abs(rate - 0.3) - 0.1 / epoch
    history.append({"val/accuracy": score, "val/loss": 1 - score})
    with open(COUNTS, "a") as counts:
        print("epoch", rate, epoch, file=counts)
    path(epoch).parent.mkdir(parents=True, exist_ok=True)
    partial = path(epoch).with_suffix(".new")
    partial.write_text(json.dumps(MANIFEST | {"epoch": epoch, "kept_epoch": epoch,
                                              "history": history}))
    partial.rename(path(epoch))
    if Path(KILL).exists() and Path(KILL).read_text() == str(rate):
        Path(KILL).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if epoch == pause and epoch < epochs:
        sys.exit(75)
Path("artifacts").mkdir(exist_ok=True)
Path("metrics").mkdir(exist_ok=True)
Path("artifacts/model").write_text(f"{rate} {epochs}")
Path("metrics/train.json").write_text(json.dumps(
    {"epochs": epochs, "kept_epoch": epochs, "val_accuracy": history[-1]["val/accuracy"]}))
"""
_EVALUATE = """\
import json
from pathlib import Path
rate = float(Path("artifacts/model").read_text().split()[0])
with open(COUNTS, "a") as counts:
    print("evaluate", rate, file=counts)
value = 1 - abs(rate - 0.3)
metric = {"value": value, "low": value - 0.01, "high": value, "confidence": 0.95, "rows": 100}
for folder in ("metrics", "reports"):
    Path(folder).mkdir(exist_ok=True)
Path("reports/evaluate.html").write_text("<title>Evaluation</title>")
Path("metrics/evaluate.json").write_text(json.dumps({
    "metrics": [metric | {"name": "accuracy"}], "baseline": [{"name": "accuracy", "value": 0.1}],
}))
"""
_SETUP = {
    "strategy": "single",
    "precision": "32-true",
    "accelerator": "cpu",
    "world_size": 1,
    "zero_stage": None,
    "offload": None,
    "parameter_dtype": None,
}
_MANIFEST: dict[str, Any] = {
    "format_version": 3,
    "step": 0,
    "segments": [],
    "actual": _SETUP,
    "files": {},
}


@dataclass(frozen=True)
class TinySearch(TinyProject):
    """A project, and the trainings that were counted in it."""

    def counts(self, word: str) -> list[str]:
        """The counted lines that begin with a word."""
        path = self.path.parent / COUNTS
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(word)]

    def write_search(
        self,
        values: str = "choice: [0.1, 0.2, 0.3]",
        *,
        method: str = "grid",
        trials: int = 3,
        halving: str = "null",
        workers: int = 1,
    ) -> None:
        """Replace the section `search` of params.yaml."""
        path = self.path / "params.yaml"
        text = path.read_text().partition("\nsearch:")[0].rstrip() + "\n"
        section = SECTION.format(
            values=values, method=method, trials=trials, halving=halving, workers=workers
        )
        path.write_text(text + section)

    def search(self, *arguments: str) -> dict[str, Any]:
        """Run `slipway search`; return its JSON output."""
        output = self.slipway("search", "--json", *arguments)
        found: dict[str, Any] = json.loads(output[output.index("{\n") :])
        return found


def make_search(folder: Path, *, epochs: int = 4) -> TinySearch:
    """Make the project in `folder`/project."""
    path = folder / "project"
    path.mkdir()
    make_project(path)
    counts, kill = str(folder / COUNTS), str(folder / "kill")
    head = f"COUNTS, KILL, MANIFEST = {counts!r}, {kill!r}, {_MANIFEST!r}\n"
    for name, text in (("clean", _CLEAN), ("train", _TRAIN), ("evaluate", _EVALUATE)):
        (path / f"{name}.py").write_text(head + text)
    (path / "extra.py").write_text("SECONDS = 0\n")
    (path / "dvc.yaml").write_text(_PIPELINE)
    (path / ".gitignore").write_text("/.work\n/artifacts/\n/reports/\n/data/clean\n__pycache__\n")
    params = path / "params.yaml"
    text = params.read_text().replace("\n  epochs: 30\n", f"\n  epochs: {epochs}\n", 1)
    params.write_text(text.replace("warmup_epochs: 2.0", "warmup_epochs: 0.5"))
    project = TinySearch(path)
    project.git("add", "-A")
    project.git("commit", "-q", "-m", "A project to search in")
    return project
