"""Checks that `kill -9` changes no result: `python -m bench.kills [NUMBER]`, 25 kills by default.

One copy of the checkout runs `dvc repro` undisturbed. Another is killed at random steps of the
training and at the beginning of each stage, and restarted each time; the victims are in turn the
trainer, dvc, and both. Weights, metrics and split of both copies must have equal digests. The
results are in bench/results/kills.md.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.conditions import conditions
from slipway.system import files
from tests.end_to_end.project import Project, copy_checkout

RESULTS = Path("bench/results/kills.md")
STAGES = (
    "clean",
    "split",
    "precompute",
    "augment",
    "train",
    "evaluate",
    "export",
    "compile",
    "verify",
)
NUM_STEPS = 8 * (1200 // 32)  # steps of the training, approximately
VICTIMS = ("trainer", "dvc", "both")
SMALL: dict[str, dict[str, Any]] = {
    "train": {
        "epochs": 8,
        "warmup_epochs": 1.0,
        "batch_size": 32,
        "checkpoint_every_minutes": 1e-4,
        "num_workers": 1,
    },
    "evaluate": {"gates": {"accuracy": {"min": 0.1, "max": None}}},
}
EQUAL = (
    "artifacts/model/weights.safetensors",
    "metrics/train.json",
    "metrics/evaluate.json",
    "data/split/rows.parquet",
)


@dataclass
class Kills:
    """The moments of the kills, and the steps from which the training resumed."""

    moments: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)


def small_project(folder: Path) -> Project:
    """Make a copy of the checkout whose training takes seconds."""
    folder.mkdir(parents=True)
    project = copy_checkout(folder)
    project.set_params(SMALL)
    return project


def digests(project: Project, names: Sequence[str] = EQUAL) -> dict[str, str]:
    """Return the digest of each file that has to be equal."""
    return {name: files.sha256_file(project.path / name) for name in names}


def run_killed(
    project: Project, num_kills: int, stages: tuple[str, ...], targets: str = "", seed: int = 7
) -> Kills:
    """Run `dvc repro TARGETS` to its end, killing it as stages begin and at random steps."""
    draws, kills = random.Random(seed), Kills()
    steps = sorted(draws.randrange(NUM_STEPS) for _ in range(num_kills))
    for stage in stages:
        if stage == "train":  # kills at random steps, before the stages after it
            for step in steps:
                _run_until(project, kills, targets, _is_past(project, step), f"after step {step}")
        _run_until(project, kills, targets, _has_begun(stage), f"as {stage} begins")
    _run_until(project, kills, targets, None, "")
    return kills


def _has_begun(stage: str) -> Callable[[str], bool]:
    return lambda output: f"Running stage '{stage}'" in output


def _is_past(project: Project, step: int) -> Callable[[str], bool]:
    """Return a function that is True once this run has a checkpoint of `step` or a later one."""

    def is_past(output: str) -> bool:
        saves = (project.path / ".work/train").glob("*/step-????????*")
        return (
            "runs as " in output
            and max((int(save.name[5:13]) for save in saves), default=0) >= step
        )

    return is_past


def _run_until(
    project: Project, kills: Kills, targets: str, is_due: Callable[[str], bool] | None, moment: str
) -> None:
    """Run `dvc repro`; kill the next victim once its output `is_due`, or never for None."""
    log = project.path / ".work/output"
    with log.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"source .venv/bin/activate && exec dvc repro {targets}"],
            cwd=project.path,
            env={**project.environment(), "PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while process.poll() is None and not (is_due and is_due(log.read_text())):
        time.sleep(0.01)
    if is_due:
        assert process.poll() is None, (
            f"it ended before it could be killed {moment}:\n{log.read_text()[-4000:]}"
        )
        victim = VICTIMS[len(kills.moments) % len(VICTIMS)]
        _kill(process.pid, victim)
        kills.moments.append(f"{victim}, {moment}")
    code = process.wait()
    assert is_due or code == 0, log.read_text()[-4000:]
    _end_survivors(process.pid)
    kills.resumed += [
        line.split(maxsplit=1)[1]
        for line in log.read_text().splitlines()
        if line.startswith("resumed ")
    ]


def _kill(dvc: int, victim: str) -> None:
    """Send SIGKILL to dvc, to the processes that it started, or to both."""
    targets = (
        [dvc]
        if victim == "dvc"
        else list(_descendants(dvc))
        if victim == "trainer"
        else [*_descendants(dvc), dvc]
    )
    for target in targets:
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)


def _descendants(process: int) -> Iterator[int]:
    with suppress(FileNotFoundError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))


def _end_survivors(session: int) -> None:
    """Kill a trainer that survives its killed dvc: it would keep running and hold the lock."""
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def _report(kills: Kills, whole: dict[str, str], killed: dict[str, str], seconds: float) -> str:
    rows = [
        f"| `{name}` | `{whole[name][:16]}` | "
        f"{'equal' if whole[name] == killed[name] else '**different**'} |"
        for name in EQUAL
    ]
    within = sum("and" in place for place in kills.resumed)
    return "\n".join(
        [
            "# `kill -9`, then `dvc repro`",
            "",
            f"{len(kills.moments)} kills of the trainer, dvc or both, by turns; the trainer found "
            f"a checkpoint {len(kills.resumed)} times, {within} of them within an epoch. "
            f"{seconds:,.0f} s in all. {conditions('torch', 'pytorch-lightning', 'dvc')}",
            "",
            "| File | SHA-256 of the uninterrupted run | After the kills |",
            "|---|---|---|",
            *rows,
            "",
            "| Kill | |",
            "|---|---|",
            *(f"| {number} | {moment} |" for number, moment in enumerate(kills.moments, start=1)),
            "",
        ]
    )


def main(num_kills: int) -> None:
    """Run both copies and write the table."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        whole, killed = (small_project(Path(folder) / name) for name in ("whole", "killed"))
        started = time.perf_counter()
        whole.shell("dvc repro", timeout_s=3600)
        kills = run_killed(killed, num_kills, STAGES)
        text = _report(kills, digests(whole), digests(killed), time.perf_counter() - started)
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
