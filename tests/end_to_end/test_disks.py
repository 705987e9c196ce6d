"""Full, read-only and forbidden disks: each stage runs in a copy of a project on a small tmpfs.

The file system needs a mount namespace; without the right to create one these tests are skipped.
Missing permissions are tested without root's privilege to ignore them.
"""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from slipway.system import files
from tests.end_to_end.project import Project

pytestmark = pytest.mark.process
STAGES = [
    "clean",
    "split",
    "precompute",
    "augment",
    "train",
    "evaluate",
    "export",
    "compile",
    "verify",
]
OWN = {  # what a stage may have replaced, file by file, before it met the fault
    "clean": ("data/clean", "reports/clean", "reports/columns"),
    "split": ("data/split", "reports/split"),
    "precompute": ("data/packed",),
    "augment": ("data/augmented", "reports/augment.png", "reports/data.html"),
    "train": ("artifacts/model", "metrics/train.json", "reports/live"),
    "evaluate": (
        "artifacts/predictions",
        "metrics/evaluate",
        "reports/evaluate",
        "reports/confusion",
        "reports/slices",
        "artifacts/calibration",
        "artifacts/ood_score",
    ),
    "export": ("artifacts/bundle", "reports/leaderboard"),
    "compile": ("artifacts/engine",),
    "verify": ("artifacts/certificate", "metrics/verify", "reports/verify"),
}
SIZE_MIB = 96
UNPRIVILEGED = "setpriv --inh-caps=-all --bounding-set=-dac_override,-dac_read_search,-fowner"
MAKE_DISK = f"mount -t tmpfs -o size={SIZE_MIB}m none disk && cp -a project/. disk && cd disk"
# Without the cache of onnxruntime, which gives blocks back while a stage runs.
FILL = (
    "rm -rf .work/cache; dd if=/dev/zero of=filler bs=1M status=none 2>/dev/null; "
    "i=0; while echo x >pad$i; do i=$((i + 1)); done 2>/dev/null; "
)
# What is done to the disk, and how a command is then run on it.
FAULTS = {
    "full": (FILL, ""),
    "nearly full": (FILL + "truncate -s -40K filler", ""),
    "read-only": ("mount -o remount,ro $PWD", ""),
    "without permission": ("chmod -R a-w .", UNPRIVILEGED),
    "with a limit of file sizes": ("", "prlimit --fsize=4096"),
}
BRIEF = [("clean", "full"), ("train", "without permission")]
SAYS = {
    "full": "No space left on device",
    "nearly full": "No space left on device",
    "read-only": "Read-only file system",
    "without permission": "Permission denied",
    "with a limit of file sizes": "File too large",
}


@cache
def can_mount() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    )


def run_on(
    project: Project, folder: Path, prepare: str, command: str
) -> tuple[int, float, str, dict[str, str]]:
    """Run `command` on a prepared copy of the project.

    Returns the exit code, seconds, stderr and the digests of all results.
    """
    if not can_mount():
        pytest.skip("no right to mount a file system here")
    (folder / "disk").mkdir(parents=True)
    (folder / "project").symlink_to(project.path)
    results = (
        "find data artifacts metrics reports -type f ! -path 'data/demo/*' -exec sha256sum {} +"
    )
    variables = f"DVC_SITE_CACHE_DIR='{folder}/dvc' PYTHONDONTWRITEBYTECODE=1"
    script = (
        f"{MAKE_DISK} && source .venv/bin/activate && export {variables}; {prepare}\n"
        f"date +%s.%N >&3; {command} >/dev/null 2>../stderr; code=$?; "
        f"date +%s.%N >&3; echo $code >&3; {results} >&3"
    )
    with (folder / "found").open("w") as found:
        script = script.replace(">&3", f">>/proc/self/fd/{found.fileno()}")
        subprocess.run(
            ["unshare", "-m", "bash", "-c", script],
            cwd=folder,
            env=project.environment(),
            pass_fds=[found.fileno()],
            timeout=300,
            check=True,
        )
    begin, end, code, *digests = (folder / "found").read_text().splitlines()
    return (
        int(code),
        float(end) - float(begin),
        (folder / "stderr").read_text(),
        {line[66:]: line[:64] for line in digests},
    )


@pytest.mark.nightly(seconds=4)
def test_split_succeeds_on_a_copied_project_with_free_space(
    finished: Project, tmp_path: Path
) -> None:
    code, _, said, _ = run_on(finished, tmp_path / "run", "", "python -m slipway.stages.split")
    assert code == 0, said


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        pytest.param(
            stage, fault, marks=[] if (stage, fault) in BRIEF else pytest.mark.nightly(seconds=4)
        )
        for stage in STAGES
        for fault in FAULTS
    ],
)
def test_a_stage_on_a_failing_disk_prints_one_error_and_leaves_other_results_unchanged(
    finished: Project, tmp_path: Path, stage: str, fault: str, is_nightly: bool
) -> None:
    prepare, runner = FAULTS[fault]
    code, seconds, said, after = run_on(
        finished, tmp_path / "run", prepare, f"{runner} python -m slipway.stages.{stage}"
    )
    if code == 0 and fault in ("nearly full", "with a limit of file sizes"):
        return  # all that it writes is small enough
    assert code == 1, said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    assert re.search(rf"/.*: {SAYS[fault]}\. [A-Z].*\.", lines[0]) or "needs" in lines[0], said
    assert "Traceback" not in said, said
    assert not is_nightly or seconds < 120  # most of it imports, on a busy machine
    before = {
        path: digest
        for path, digest in results(finished.path).items()
        if not path.startswith(OWN[stage])
    }
    assert {path: after.get(path) for path in before} == before


def results(root: Path) -> dict[str, str]:
    found = [
        path
        for folder in ("data", "artifacts", "metrics", "reports")
        for path in (root / folder).rglob("*")
        if path.is_file()
    ]
    return {
        path.relative_to(root).as_posix(): files.sha256_file(path)
        for path in found
        if not path.is_relative_to(root / "data/demo")
    }
