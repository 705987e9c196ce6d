"""Measures the memory of each process that trains a transformer: whole, with FSDP, with ZeRO-3.

`python -m bench.divided_memory` trains a few steps on texts on the CPU, and reads the resident
memory of every process from /proc. Pages of mapped files do not count, because the system reclaims
them when it needs memory. Before it trains, `slipway plan` predicts the memory of a process. It
prints one table, and writes it again after each strategy.
"""

import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.conditions import conditions
from slipway.system import files
from tests.training.real_runs import environment
from tests.training.text_projects import write_text_project

RESULT = Path("bench/results/divided_memory.md")
SCRATCH = Path("tmp/bench/divided_memory")
SETUPS = (("deepspeed_stage_3", 2), ("fsdp", 2), ("single", 1))
ARGUMENTS = {"width": 1280, "num_layers": 27, "num_heads": 8, "patch": 4, "dropout": 0.0}
STATE_BYTES = 16  # of a float32 weight, its gradient and the two moments of Adam
_POLL_SECONDS = 0.05


@dataclass
class Run:
    """One training, and the memory of its processes."""

    strategy: str
    processes: int
    losses: list[str] = field(default_factory=list)
    num_parameters: int = 0
    planned_mb: float = 0.0
    # Largest resident memory so far, in MB, by process id
    at_start: dict[int, float] = field(default_factory=dict)
    peak: dict[int, float] = field(default_factory=dict)  # while training, including checkpoints
    at_end: dict[int, float] = field(default_factory=dict)  # while the model is written

    def line(self, whole_mb: float) -> str:
        start, peak, end = (
            max(seen.values(), default=0.0) for seen in (self.at_start, self.peak, self.at_end)
        )
        state = STATE_BYTES * self.num_parameters / self.processes / 1e6
        return (
            f"| {self.strategy} | {self.processes} | {start:.0f} | {peak:.0f} | {end:.0f} "
            f"| {self.planned_mb:.0f} | {whole_mb:.0f} | {state:.0f} | {', '.join(self.losses)} |"
        )


def _processes(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += _processes(int(child))
    return found


def _resident_mb(pid: int) -> tuple[bool, float]:
    """Return (True for a training process, MB of its memory that no file backs)."""
    status = Path(f"/proc/{pid}/status").read_text()
    command = Path(f"/proc/{pid}/cmdline").read_text()
    found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return "slipway.stages.train" in command, int(found[0]) / 1e3 if found else 0.0


def _writes_model(pid: int) -> bool:
    """Return True if a process has mapped a checkpoint, from which it writes the model."""
    return "/step-" in Path(f"/proc/{pid}/maps").read_text()


def run(run: Run) -> None:
    """Train, and record each process's peak before the first step, while training, and after."""
    folder = SCRATCH / run.strategy
    write_text_project(
        folder,
        strategy=run.strategy,
        devices=run.processes,
        network_arguments=ARGUMENTS,
        epochs=1,  # of three steps
        warmup_epochs=0.0,
        batch_size=24,
        learning_rate=1e-4,
        keep="last",
        num_workers=0,
    )
    run.planned_mb = _planned_mb(folder)
    command = [sys.executable, "-u", "-m", "slipway.stages.train"]
    losses = folder / "reports/live/plots/metrics/train/loss.tsv"
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            has_started = "runs as" in (folder / "output").read_text()
            try:
                for pid in _processes(process.pid):
                    trains, resident = _resident_mb(pid)
                    seen = run.peak if has_started else run.at_start
                    seen = run.at_end if _writes_model(pid) else seen
                    if trains:
                        seen[pid] = max(resident, seen.get(pid, 0.0))
            except (OSError, IndexError):
                pass  # a process that has just ended
            time.sleep(_POLL_SECONDS)
    text = (folder / "output").read_text()
    if process.returncode:
        raise RuntimeError(text)
    run.losses = [f"{float(line.split()[1]):.6f}" for line in losses.read_text().splitlines()[1:]]
    run.num_parameters = int(text.partition(" parameters")[0].split()[-1].replace(",", ""))
    shutil.rmtree(folder)


def _planned_mb(folder: Path) -> float:
    """Return the memory that `slipway plan` predicts for a process of the project."""
    command = [sys.executable, "-m", "slipway.planning.plan", "--seconds", "0"]
    done = subprocess.run(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True)
    found = re.search(r"process +([\d.]+) ([MG])B", done.stdout)
    if not found:
        raise RuntimeError(done.stdout)
    return float(found[1]) * {"M": 1, "G": 1e3}[found[2]]


def main() -> None:
    """Measure all setups one after the other, and write the table."""
    lines = [
        (
            "| Strategy | Processes | Peak before the first step, MB | Peak while it trains, MB "
            "| Peak while it ends, MB | Planned, MB | All weights, MB | State by the formula, MB "
            "| Loss |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for setup in SETUPS:
        each = Run(*setup)
        run(each)
        lines.append(each.line(4 * each.num_parameters / 1e6))
        print(lines[-1], flush=True)
        note = (
            f"A transformer of {each.num_parameters / 1e6:.0f} million parameters, float32, 24 "
            "texts of 32 bytes a step, on the CPU over gloo. Memory is the resident memory of the "
            "largest process without mapped files; Python and its libraries are in it."
        )
        table = "\n".join(lines)
        files.write_text(
            RESULT,
            f"# Memory of a process that holds a part of a network\n\n{table}\n\n{note}\n"
            f"{conditions('torch', 'pytorch-lightning', 'deepspeed')}\n",
        )


if __name__ == "__main__":
    main()
