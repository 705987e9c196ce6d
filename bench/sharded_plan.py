"""Compares the planned memory of divided networks with the tensors of real steps.

`python -m bench.sharded_plan` runs the transformers with each strategy in new processes on the CPU,
one after the other, and writes one table. The largest takes 15 GB.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.conditions import conditions
from slipway.system import files

RESULT = Path("bench/results/sharded_plan.md")
STRATEGIES = ("ddp", "fsdp", "tensor_parallel", "pipeline")
# Width, layers, rows: 7 to 361 million weights.
SHAPES = [
    (256, 12, 4),
    (512, 8, 8),
    (512, 24, 4),
    (768, 4, 64),
    (1024, 6, 8),
    (1024, 24, 8),
    (1280, 27, 4),
]
CASES = [
    *((strategy, 2, SHAPES) for strategy in STRATEGIES),
    *((strategy, 4, [SHAPES[1]]) for strategy in STRATEGIES[2:]),  # two copies
]
HEADER = [
    "| Strategy | Processes | Weights, million | Width | Layers | Rows | Predicted, MB "
    "| Allocated, MB | Error |",
    "|---|---|---|---|---|---|---|---|---|",
]


def lines(strategy: str, num_processes: int, shapes: list[tuple[int, int, int]]) -> Iterator[str]:
    """Measure shapes with one strategy; yield their rows of the table."""
    processes = f"--nproc_per_node={num_processes}"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", processes),
        *("-m", "tests.planning.measured_shards", strategy),
        *(",".join(map(str, shape)) for shape in shapes),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for shape, found in zip(shapes, measured, strict=True):
        predicted, allocated = (found[name] / 1e6 for name in ("predicted", "allocated"))
        cells = [strategy, num_processes, f"{found['weights'] / 1e6:.1f}", *shape]
        cells += [f"{predicted:.0f}", f"{allocated:.0f}", f"{predicted / allocated - 1:+.1%}"]
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measure all shapes one after the other, and write the table."""
    table = list(HEADER)
    for case in CASES:
        for line in lines(*case):
            table.append(line)
            print(line, flush=True)
    text = "\n".join(table)
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
