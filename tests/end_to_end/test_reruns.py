"""The cost of a changed parameter: only the stages that read it run again.

`dvc repro` with nothing to do is quick.
"""

import json
import resource
import shlex
import statistics
from typing import Any

import pytest

from tests.end_to_end.project import Project

pytestmark = pytest.mark.process

# One key of each kind: read by one stage, by several, by an early one, by a late one.
READERS: dict[str, tuple[Any, set[str]]] = {
    "seed": (8, {"split", "augment", "audit", "train", "evaluate", "prune", "export", "verify"}),
    "data.engine": ("ray", {"clean", "precompute"}),
    # Read by the stages that read raw bytes.
    "data.image_column": ("picture", {"clean", "precompute", "evaluate", "verify"}),
    "data.sources": (["*"], {"clean", "precompute", "evaluate", "verify"}),
    "data.split_column": ("part", {"clean", "split"}),
    "clean.blur_variance": (21.0, {"clean"}),
    "clean.max_pixels": (1_000_000, {"clean", "precompute"}),
    "clean.num_workers": (1, {"clean"}),
    "clean.rules.blurred": (None, {"clean"}),
    "split.assignment": ("stable", {"split"}),
    "precompute.image_size_px": (20, {"precompute"}),
    "augment.rotation_deg": (5.0, {"augment"}),
    "audit.epochs": (3, {"audit"}),
    "train.learning_rate": (0.001, {"audit", "train", "prune"}),
    "evaluate.batch_size": (64, {"evaluate", "prune"}),
    "evaluate.gates.accuracy.min": (0.5, {"evaluate"}),
    "evaluate.max_regression": (0.02, {"evaluate"}),
    "evaluate.slice_min_rows": (21, {"evaluate"}),
    "evaluate.confidence": (0.9, {"evaluate", "prune", "export", "verify"}),
    "prune.epochs": (3, {"prune"}),
    "export.quantization_samples": (16, {"export"}),
    "compile.workspace_mib": (512, {"compile"}),
    "verify.timing_rounds": (6, {"verify"}),
}


# Runs `dvc status` for each content of params.yaml in one process, because importing DVC takes a
# second. Equal YAML texts are parsed once: DVC parses dvc.lock again and again, and params.yaml for
# each stage.
STATUS_OF_EACH = """
import json, sys
from copy import deepcopy
from pathlib import Path
from dvc.repo import Repo
from ruamel.yaml import YAML
parse, parsed = YAML.load, {}
def parse_once(self, text):
    key = (text, *self.typ)
    if key not in parsed:
        parsed[key] = parse(self, text)
    return deepcopy(parsed[key])
YAML.load = parse_once
for content in json.load(sys.stdin):
    Path("params.yaml").write_text(content)
    with Repo() as repo:
        print(json.dumps(sorted(repo.status())))
"""


@pytest.fixture(name="stages_to_run", scope="module")
def _stages_to_run(
    finished: Project, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, set[str]]:
    """The stages that DVC reports as changed for a new value of each key, without later stages."""
    path = finished.path / "params.yaml"
    before, contents = path.read_text(), tmp_path_factory.mktemp("contents") / "contents.json"
    try:
        contents.write_text(json.dumps([_with_value(finished, key, before) for key in READERS]))
        said = finished.shell(f"python -c {shlex.quote(STATUS_OF_EACH)} < {contents}").splitlines()[
            -len(READERS) :
        ]
    finally:
        path.write_text(before)
    return {key: set(json.loads(line)) for key, line in zip(READERS, said, strict=True)}


def _with_value(project: Project, key: str, content: str) -> str:
    """params.yaml with the other value of `key` in READERS."""
    (project.path / "params.yaml").write_text(content)
    project.set_value(key, READERS[key][0])
    return (project.path / "params.yaml").read_text()


@pytest.mark.parametrize("key", READERS)
def test_a_changed_parameter_reruns_only_the_stages_that_read_it(
    key: str, stages_to_run: dict[str, set[str]]
) -> None:
    # The stage `code` checks params.yaml after any change.
    assert stages_to_run[key] == {"code", *READERS[key][1]}


def test_an_unchanged_project_has_no_stage_to_run(finished: Project) -> None:
    assert json.loads(finished.shell("dvc status --json").splitlines()[-1]) == {}


@pytest.mark.nightly
def test_repro_with_nothing_to_do_takes_less_than_three_seconds_of_a_core(
    finished: Project,
) -> None:
    """Compared with `dvc version`, which takes half a second, so the machine's speed cancels out.

    Measures processor time, because DVC uses one core and other processes may use it, too.
    """

    def seconds(command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        finished.shell(command)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(seconds("dvc repro"), seconds("dvc version")) for _ in range(3)]
    assert 1 < statistics.median(repro / version for repro, version in pairs) < 6
