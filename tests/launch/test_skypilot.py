"""The task of SkyPilot: accepted by its own schema, and resumable on another machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipway.cli.command import main
from tests.conftest import ROOT

TASK = (ROOT / "launch/skypilot.yaml").read_text()
TASK = TASK.replace("@processes@", "1").replace("@setup@", "./install.sh")
# Prints the resources that SkyPilot reads from a task, or its error.
READ = """
import sys, yaml
import sky
task = sky.Task.from_yaml_config(
    yaml.safe_load(open(sys.argv[1])),
    env_overrides=[("BUCKET", "s3://my-checkpoints"), ("NAME", "digits")],
)
print(sorted(str(resource) for resource in task.resources), list(task.storage_mounts))
"""
# In place of `slipway run`: the first machine is preempted after a checkpoint, the second resumes.
RUN = """#!/bin/bash
[ "$1" = run ] || exit 1
if [ ! -e .work/train/step-1 ]; then mkdir .work/train/step-1; exit 143; fi
mkdir -p artifacts metrics reports
echo resumed > artifacts/model
touch dvc.lock
"""


def _task() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(TASK)
    return content


def _run(machine: Path, bucket: Path) -> int:
    """Run the task on a new machine, whose folder has only what SkyPilot copies there."""
    (machine / "bin").mkdir(parents=True)
    (machine / "params.yaml").write_text("seed: 7\n")
    for name, text in {"slipway": RUN, "dvc": "#!/bin/bash\n"}.items():
        (machine / "bin" / name).write_text(text)
        (machine / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{machine / 'bin'}:{os.environ['PATH']}",
        "SLIPWAY_KEPT": str(bucket),
        "NAME": "digits",
    }
    return subprocess.run(["bash", "-c", _task()["run"]], cwd=machine, env=environment).returncode


def test_another_machine_finds_the_checkpoints_and_leaves_the_results_in_the_bucket(
    tmp_path: Path,
) -> None:
    bucket = tmp_path / "bucket"
    assert _run(tmp_path / "first", bucket) == 143
    assert not (bucket / "digits/artifacts").exists()
    assert _run(tmp_path / "second", bucket) == 0
    assert (bucket / "digits/artifacts/model").read_text() == "resumed\n"
    assert (bucket / "digits/params.yaml").exists()
    assert (bucket / "digits/train/step-1").is_dir()


def test_launch_skypilot_writes_the_task_for_a_clone_and_names_its_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("slipway.cli.launch.CODE", tmp_path)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    main(["launch", "skypilot", "--gpus-per-node", "4"])
    content = yaml.safe_load((tmp_path / "skypilot.yaml").read_text())
    assert set(content["resources"]["accelerators"]) == {"L4:4", "A10G:4", "A100:4"}
    assert "train.devices=4" in content["run"]
    assert content["setup"] == "set -e\n./install.sh\n"


def test_a_bucket_and_a_name_are_required() -> None:
    assert _task()["envs"] == {"BUCKET": None, "NAME": None}
    assert _task()["resources"]["use_spot"] is True


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with SkyPilot, which does not fit the project's own."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed, which makes the environment of SkyPilot")
    folder = tmp_path_factory.mktemp("skypilot")
    made = [uv, "venv", "--quiet", "--python", sys.executable, str(folder)]
    package = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin/python"), "skypilot"]
    for command in (made, package):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"SkyPilot does not install here: {done.stderr.strip()[-300:]}")
    return folder / "bin/python"


def _read(python: Path, task: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-c", READ, str(task)],
        cwd=task.parent,
        capture_output=True,
        text=True,
    )


@pytest.mark.nightly(seconds=120)
def test_skypilot_reads_the_task(python: Path, tmp_path: Path) -> None:
    (tmp_path / "skypilot.yaml").write_text(TASK)
    done = _read(python, tmp_path / "skypilot.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[Spot]") == 3
    assert "['/slipway']" in done.stdout


@pytest.mark.nightly(seconds=120)
def test_skypilot_refuses_a_task_with_an_unknown_key(python: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "task.yaml"
    wrong.write_text(TASK.replace("use_spot", "use_spots"))
    done = _read(python, wrong)
    assert done.returncode
    assert "use_spots" in done.stderr
