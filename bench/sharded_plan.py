"""Compares the planned memory of divided networks with the tensors of real steps.

`python -m bench.sharded_plan` runs each transformer with each strategy in new processes on the CPU,
and writes one table.
"""

import json
import subprocess
import sys
from pathlib import Path

from bench.conditions import conditions
from slipway.system import files

RESULT = Path("bench/results/sharded_plan.md")
STRATEGIES = ("ddp", "fsdp", "tensor_parallel", "pipeline")
SHAPES = [(256, 12, 4), (512, 8, 8), (512, 24, 4), (768, 4, 64), (1024, 6, 8), (1024, 24, 8)]
CASES = [
    *((strategy, 2, shape) for strategy in STRATEGIES for shape in SHAPES),
    *((strategy, 4, SHAPES[1]) for strategy in STRATEGIES[2:]),  # two copies
]


def line(strategy: str, num_processes: int, width: int, num_layers: int, rows: int) -> str:
    """Measure one shape and strategy; return its row of the table."""
    processes = f"--nproc_per_node={num_processes}"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", processes),
        *("-m", "tests.planning.measured_shards", strategy, *map(str, (width, num_layers, rows))),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    predicted, allocated = (found[name] / 1e6 for name in ("predicted", "allocated"))
    shape = f"{num_processes} | {width} | {num_layers} | {rows}"
    return (
        f"| {strategy} | {shape} | {predicted:.0f} | {allocated:.0f} "
        f"| {predicted / allocated - 1:+.1%} |"
    )


def main() -> None:
    """Measure all shapes one after the other, and write the table."""
    lines = [
        "| Strategy | Processes | Width | Layers | Rows | Predicted, MB | Allocated, MB | Error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for strategy, num_processes, shape in CASES:
        lines.append(line(strategy, num_processes, *shape))
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    note = (
        "A transformer of texts of 64 bytes in float32; the process over gloo that takes most. "
        "Four processes are two copies."
    )
    files.write_text(
        RESULT,
        f"# Predicted and real memory of divided networks\n\n{text}\n\n{note}\n"
        f"{conditions('torch')}\n",
    )


if __name__ == "__main__":
    main()
