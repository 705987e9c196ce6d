"""`dvc` with the real stage `code` and real code: what a change of code re-runs."""

import json
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from slipway.kinds.code_digest import reached_files
from tests.end_to_end.project import Project, copy_checkout

pytestmark = pytest.mark.process
STAGES = [
    "clean",
    "split",
    "precompute",
    "augment",
    "audit",
    "train",
    "evaluate",
    "prune",
    "export",
    "compile",
    "verify",
]


@pytest.fixture(name="project", scope="module")
def _project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of the checkout in which every stage but `code` does nothing, after `dvc repro`."""
    project = copy_checkout(tmp_path_factory.mktemp("code"))
    yaml = YAML(typ="safe", pure=True)
    content = yaml.load(project.path / "dvc.yaml")
    for name in STAGES:
        digests = [key for key in content["stages"][name]["params"] if isinstance(key, dict)]
        meta = content["stages"][name]["meta"]
        content["stages"][name] = {"cmd": f"echo runs {name}", "meta": meta, "params": digests}
    del content["plots"]
    yaml.dump(content, project.path / "dvc.yaml")
    (project.path / "dvc.lock").unlink(missing_ok=True)
    said = project.shell("dvc repro && git add -A && git commit -qm 'Cut down'")
    assert stages_run(said) == set(STAGES)
    return project


def stages_run(said: str) -> set[str]:
    return {line.split()[-1] for line in said.splitlines() if line.startswith("runs ")}


def after(project: Project, name: str, old: str, new: str) -> set[str]:
    """The stages that `dvc repro` runs once the file `name` has other text; then it is restored."""
    path = project.path / name
    before = path.read_text()
    assert old in before
    try:
        path.write_text(before.replace(old, new, 1))
        changed = json.loads(
            project.shell("dvc repro -q code && dvc status --json").splitlines()[-1]
        )
        ran = stages_run(project.shell("dvc repro"))
        assert set(changed) - {"code"} == ran
        return ran
    finally:
        path.write_text(before)
        project.shell("dvc repro")


@pytest.mark.nightly(seconds=14)
def test_changed_comments_and_docstrings_rerun_no_stage(project: Project) -> None:
    cores = project.path / "slipway/system/cores.py"
    before = cores.read_text()
    try:
        cores.write_text(before.replace("import", "# a comment\n\nimport", 1))
        assert after(project, "slipway/training/module.py", '"""', '"""Another text. ') == set()
    finally:
        cores.write_text(before)


@pytest.mark.parametrize(
    ("name", "old", "new", "stages"),
    [
        pytest.param(
            "slipway/training/module.py",
            "\nimport",
            "\nimport sys\nimport",
            {"audit", "train", "prune"},
            marks=pytest.mark.nightly(seconds=30),
        ),
        pytest.param(
            *("slipway/serving/page/app.js", "import", "import ", {"verify"}),
            marks=pytest.mark.nightly(seconds=12),
        ),
    ],
)
def test_a_changed_line_reruns_exactly_the_stages_that_reach_its_module(
    project: Project, name: str, old: str, new: str, stages: set[str]
) -> None:
    reach = {
        stage
        for stage in STAGES
        if Path(name) in reached_files(project.path, [Path(f"slipway/stages/{stage}.py")])
    }
    assert after(project, name, old, new) == reach
    assert reach >= stages


def test_a_changed_user_function_reruns_the_stages_that_call_it(project: Project) -> None:
    assert after(project, "transforms/__init__.py", '"""', 'X = 1\n"""') == {
        "precompute",
        "evaluate",
        "verify",
    }


@pytest.mark.nightly(seconds=13)
def test_a_changed_param_changes_the_digests_of_params_only(project: Project) -> None:
    before = YAML(typ="safe", pure=True).load(project.path / "code.yaml")
    path = project.path / "params.yaml"
    text = path.read_text()
    try:
        path.write_text(text.replace("seed: 7", "seed: 17"))
        project.shell("python -m slipway.stages.code")
        found = YAML(typ="safe", pure=True).load(project.path / "code.yaml")
    finally:
        path.write_text(text)
        project.shell("python -m slipway.stages.code")
    assert {name: one["code"] for name, one in found.items()} == {
        name: one["code"] for name, one in before.items()
    }
    assert found["train"]["params"] != before["train"]["params"]
    assert found["clean"] == before["clean"]


def test_a_mistake_in_params_yaml_is_found_before_any_other_stage_runs(project: Project) -> None:
    path = project.path / "params.yaml"
    before = path.read_text()
    try:
        path.write_text(before.replace("train:", "trian:", 1))
        said = project.shell("dvc repro", succeeds=False)
    finally:
        path.write_text(before)
        project.shell("dvc repro")
    assert "did you mean 'train'?" in said
    assert stages_run(said) == set()


@pytest.mark.parametrize(
    "options", ["", pytest.param("--temp", marks=pytest.mark.nightly(seconds=60))]
)
def test_a_dvc_experiment_runs_with_code_digests(project: Project, options: str) -> None:
    said = project.shell(f"dvc exp run {options} -n with{options.strip('-')} -S seed=11")
    assert "Ran experiment" in said
    project.shell("git checkout -q -f . && dvc repro")


def test_a_fresh_clone_recreates_the_code_digests(project: Project, tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", str(project.path), str(tmp_path / "clone")], check=True)
    clone = Project(tmp_path / "clone")
    (clone.path / ".venv").symlink_to((project.path / ".venv").resolve())
    assert not (clone.path / "code.yaml").exists()
    clone.shell("dvc repro")  # the digests are those of dvc.lock, so nothing but `code` runs
    assert (clone.path / "code.yaml").read_bytes() == (project.path / "code.yaml").read_bytes()
