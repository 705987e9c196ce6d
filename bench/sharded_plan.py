"""Compares the plan's memory of fsdp with the tensors of real steps in two processes.

`python -m bench.sharded_plan` runs each transformer in processes of their own on the CPU, and
writes one table.
"""

import json
import subprocess
import sys
from pathlib import Path

from bench.conditions import conditions
from slipway.system import files

RESULT = Path("bench/results/sharded_plan.md")
SHAPES = [(256, 12, 4), (512, 8, 8), (512, 24, 4), (768, 4, 64), (1024, 6, 8)]


def line(width: int, num_layers: int, rows: int) -> str:
    """One row of the table."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
        *("-m", "tests.planning.measured_shards", str(width), str(num_layers), str(rows)),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    predicted, allocated = (found[name] / 1e6 for name in ("predicted", "allocated"))
    return (
        f"| {width} | {num_layers} | {rows} | {predicted:.0f} | {allocated:.0f} "
        f"| {predicted / allocated - 1:+.1%} |"
    )


def main() -> None:
    """All shapes, one after the other."""
    lines = [
        "| Width | Layers | Rows | Predicted, MB | Allocated, MB | Error |",
        "|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        lines.append(line(*shape))
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    note = (
        "A transformer of texts of 64 bytes under fsdp in float32; one of two processes over gloo."
    )
    files.write_text(
        RESULT,
        f"# Predicted and real memory of fsdp\n\n{text}\n\n{note}\n{conditions('torch')}\n",
    )


if __name__ == "__main__":
    main()
