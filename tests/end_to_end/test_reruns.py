"""The cost of a changed parameter: only the stages that read it run again.

`dvc repro` with nothing to do is quick.
"""

import json
import resource
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from slipway.config.params import resolved
from slipway.config.seals import stage_params
from slipway.config.stage_graph import read_pipeline
from slipway.system import files
from tests.end_to_end.project import Project
from tests.project_params import own_content

pytestmark = pytest.mark.process
SECTIONS = "slipway/config/sections.py"

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
    "split.assignment": ("exact", {"split"}),
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


def stages_that_read(key: str, value: Any) -> set[str]:
    """Return the stages whose digest of params in code.yaml changes with a value."""
    before, after = own_content(), own_content()
    *sections, name = key.split(".")
    section = after
    for part in sections:
        section = section[part]
    section[name] = value
    pipeline = read_pipeline(before)
    digests = [
        {stage: files.digest_json(stage_params(values, pipeline, stage)) for stage in pipeline.outs}
        for values in (resolved(before), resolved(after))
    ]
    return {stage for stage in pipeline.outs if digests[0][stage] != digests[1][stage]} - {"code"}


@pytest.mark.unit
@pytest.mark.parametrize("key", READERS)
def test_a_changed_parameter_changes_the_digests_of_the_stages_that_read_it(key: str) -> None:
    value, stages = READERS[key]
    assert stages_that_read(key, value) == stages


def to_run(project: Project) -> set[str]:
    """Run the stage `code`, and return the other stages that DVC would run, with their reason."""
    project.shell("python -m slipway.stages.code")
    answer = json.loads(project.shell("dvc status --json").splitlines()[-1])
    assert "always changed" in answer.pop("code")
    return set(answer)


@pytest.fixture(name="restored")
def _restored(finished: Project) -> Iterator[Project]:
    """The finished project; its params.yaml and the edited section are restored afterwards."""
    paths = [finished.path / name for name in ("params.yaml", SECTIONS)]
    before = [path.read_text() for path in paths]
    yield finished
    for path, text in zip(paths, before, strict=True):
        path.write_text(text)
    assert to_run(finished) == set()


def test_an_unchanged_project_and_a_key_written_at_its_default_rerun_nothing(
    restored: Project,
) -> None:
    assert to_run(restored) == set()
    with (restored.path / "params.yaml").open("a") as file:
        file.write("prune: { sparsity: 0.5 }\n")
    assert to_run(restored) == set()


def test_a_changed_value_and_a_changed_default_rerun_the_stages_that_read_them(
    restored: Project,
) -> None:
    restored.set_value("audit.epochs", 3)
    assert to_run(restored) == {"audit"}
    path = restored.path / SECTIONS
    text = path.read_text()
    assert "batch_seconds: PositiveFloat = 60.0" in text
    path.write_text(text.replace("PositiveFloat = 60.0", "PositiveFloat = 61.0"))
    assert to_run(restored) == {"audit", "verify"}


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
