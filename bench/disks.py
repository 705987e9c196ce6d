"""Measures how soon a stage reports a disk that is full, read-only or without permission.

`python -m bench.disks` runs the pipeline once on a small project, then every stage on copies of it
on a separate file system, and prints and writes one table. It needs the right to mount one.
"""

import shutil
import statistics
import tempfile
from pathlib import Path

from bench.conditions import conditions
from slipway.system import files
from tests.end_to_end.conftest import SMALL
from tests.end_to_end.project import Project, copy_checkout, draw_shapes
from tests.end_to_end.test_disks import FAULTS, STAGES, can_mount, run_on

RESULT = Path("bench/results/disks.md").resolve()
TRIED = ("full", "read-only", "without permission")
NUM_RUNS = 3


def seconds(project: Project, scratch: Path, stage: str, fault: str) -> list[float]:
    """Return the seconds until the stage fails, for each run.

    Raises RuntimeError unless the stage ends with exit code 1 and one line of output.
    """
    prepare, runner = FAULTS[fault]
    taken = []
    for number in range(NUM_RUNS):
        folder = scratch / f"{stage}-{fault}-{number}"
        code, elapsed, said, _ = run_on(
            project, folder, prepare, f"{runner} python -m slipway.stages.{stage}"
        )
        if code != 1 or said.count("error: ") != 1:
            raise RuntimeError(f"{stage} on a disk that is {fault} ended with {code}:\n{said}")
        taken.append(elapsed)
        shutil.rmtree(folder, ignore_errors=True)
    return taken


def main() -> None:
    """Measure every stage with every fault, and write the table."""
    if not can_mount():
        raise SystemExit("error: no right to mount a file system here.")
    lines = ["| Stage | " + " | ".join(TRIED) + " |", "|---|" + "---|" * len(TRIED)]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "project").mkdir()
        project = copy_checkout(scratch / "project")
        draw_shapes(project.path / "data/own")
        train = SMALL["train"] | {
            "strategy": "single",
            "devices": 1,
            "precision": "32-true",
            "epochs": 5,
        }
        project.set_params(
            SMALL | {"train": train, "evaluate": {"gates": {}}}
        )  # only the disks are measured
        project.set_value("clean.rules.near_duplicate", None)
        project.shell("dvc repro")
        for stage in STAGES:
            cells = [seconds(project, scratch, stage, fault) for fault in TRIED]
            lines.append(
                f"| {stage} | "
                + " | ".join(
                    f"{statistics.median(taken):.1f} (to {max(taken):.1f})" for taken in cells
                )
                + " |"
            )
            print(lines[-1], flush=True)
    text = "\n".join(lines)
    note = (
        f"Seconds from the command to exit code 1 and its one line, median of {NUM_RUNS} and the "
        "longest; most of it imports."
    )
    files.write_text(
        RESULT, f"# A disk that refuses\n\n{note}\n\n{text}\n\n{conditions('torch', 'dvc')}\n"
    )


if __name__ == "__main__":
    main()
