"""Compares the accuracy of DeepSpeed on two processes with that of DDP and of one process.

`python -m bench.strategies`, after `dvc repro`, trains and evaluates the packed data of this
checkout once for each strategy and seed: bf16 and fp16, with and without offload. It works in
separate folders under tmp/, and prints and writes one table.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.conditions import conditions
from slipway.config.yaml_files import read_yaml
from slipway.config.yaml_text import yaml_text
from slipway.system import files

ROOT = Path.cwd()
SCRATCH = ROOT / "tmp" / "bench" / "strategies"
RESULT = Path("bench/results/strategies.md")
SEEDS = (7, 1, 2)
SETUPS = (
    ("single", "32-true", None, 1),
    ("ddp", "32-true", None, 2),
    ("deepspeed_stage_1", "bf16-mixed", None, 2),
    ("deepspeed_stage_2", "bf16-mixed", None, 2),
    ("deepspeed_stage_2", "bf16-mixed", "optimizer", 2),
    ("deepspeed_stage_2", "16-mixed", None, 2),
    ("deepspeed_stage_3", "bf16-mixed", None, 2),
    ("deepspeed_stage_3", "bf16-mixed", "optimizer_and_parameters", 2),
)


@dataclass
class Runs:
    """The results of one setup, for all seeds."""

    strategy: str
    precision: str
    offload: str | None
    processes: int
    accuracies: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_rows: int = 0

    def line(self) -> str:
        accuracies = ", ".join(f"{accuracy:.4f}" for accuracy in self.accuracies)
        median = f"{statistics.median(self.accuracies):.4f}"
        return (
            f"| {self.strategy} | {self.precision} | {self.offload or 'none'} | {self.processes} "
            f"| {median} | {accuracies} "
            f"| {statistics.median(self.seconds):.0f} |"
        )


def prepare(runs: Runs, seed: int) -> Path:
    """Make a folder with this checkout's data, for the stages to run with changed params."""
    folder = SCRATCH / f"{runs.strategy}-{runs.precision}-{runs.offload}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    for name in ("packed", "augmented"):
        (folder / "data" / name).symlink_to(ROOT / "data" / name)
    params: dict[str, Any] = read_yaml(ROOT / "params.yaml")
    params["seed"] = seed
    params["train"] |= {
        "strategy": runs.strategy,
        "precision": runs.precision,
        "offload": runs.offload,
        "devices": runs.processes,
    }
    params["train"]["accelerator"] = "cpu"
    params["evaluate"]["gates"] = {}
    (folder / "params.yaml").write_text(yaml_text(params))
    return folder


def run(runs: Runs, seed: int) -> None:
    """Train and evaluate once."""
    folder = prepare(runs, seed)
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    for stage in ("train", "evaluate"):
        begin = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", f"slipway.stages.{stage}"],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{stage} in {folder} failed:\n{done.stdout}\n{done.stderr}")
        if stage == "train":
            runs.seconds.append(time.perf_counter() - begin)
    metrics = json.loads((folder / "metrics/evaluate.json").read_text())
    runs.accuracies.append(metrics["accuracy"])
    runs.num_rows = metrics["rows"]


def main() -> None:
    """Run all seeds of all setups in turns, and write the table."""
    everything = [Runs(*setup) for setup in SETUPS]
    for seed in SEEDS:
        for runs in everything:
            run(runs, seed)
            print(f"seed {seed}: {runs.line()}", flush=True)
    lines = [
        (
            "| Strategy | Precision | Offload | Processes | Test accuracy, median | of each seed "
            "| Training, s |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    lines += [runs.line() for runs in everything]
    seeds = ", ".join(map(str, SEEDS))
    note = (
        f"The params and the split of this checkout, training seeds {seeds}, "
        f"{everything[0].num_rows} test rows, on the CPU over gloo."
    )
    text = "\n".join(lines)
    print(text)
    versions = conditions("torch", "pytorch-lightning", "deepspeed")
    files.write_text(
        ROOT / RESULT, f"# Strategies on two CPU processes\n\n{text}\n\n{note}\n{versions}\n"
    )


if __name__ == "__main__":
    main()
