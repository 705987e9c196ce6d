"""Compares the memory that `slipway plan` predicts with that of real steps.

`python -m bench.memory_plan` runs each network in a new process and writes one table. It compares
the predicted tensors with torch's allocator, and the predicted process with the growth of the
resident set.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.conditions import conditions
from slipway.planning.resource_plan import CPU_SLACK
from slipway.system import files

RESULT = Path("bench/results/memory_plan.md")
RESNET = {
    "width": 64,
    "blocks": [1, 1, 1],
    "dropout": 0.0,
    "stochastic_depth": 0.0,
    "normalisation": "batch",
}
TABM = {
    "num_submodels": 16,
    "num_blocks": 2,
    "width": 256,
    "dropout": 0.1,
    "embedding_size": 32,
    "num_bins": 24,
}
SETUPS: list[tuple[str, dict[str, Any], int, str]] = [
    ("small_resnet", RESNET, 128, "32-true"),
    ("small_resnet", RESNET, 128, "bf16-mixed"),
    ("timm/resnet18", {}, 128, "32-true"),
    ("tabm", TABM, 2048, "32-true"),
]


def line(network: str, arguments: dict[str, Any], rows: int, precision: str) -> str:
    """Return one row of the table."""
    command = [
        sys.executable,
        "-m",
        "tests.planning.measured_step",
        network,
        json.dumps(arguments),
        str(rows),
        precision,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    predicted, allocated, process, grown = (
        found[name] / 1e6 for name in ("predicted", "allocated", "process", "grown")
    )
    return (
        f"| {network} | {precision} | {rows} | {predicted:.0f} | {allocated:.0f} | "
        f"{predicted / allocated - 1:+.0%} "
        f"| {process:.0f} | {grown:.0f} | {process / grown - 1:+.0%} |"
    )


def main() -> None:
    """Measure all setups, one after the other, and write the table."""
    lines = [
        (
            "| Network | Precision | Rows | Tensors predicted, MB | allocated, MB | error | "
            "Process predicted, MB | grown by, MB | error |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for setup in SETUPS:
        lines.append(line(*setup))
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    note = (
        f"Images of 32 px in colour, a table of five columns. The process's slack is {CPU_SLACK} "
        "times the activations."
    )
    files.write_text(
        RESULT,
        (
            "# Predicted and real memory of a step, on the "
            f"CPU\n\n{text}\n\n{note}\n{conditions('torch', 'timm')}\n"
        ),
    )


if __name__ == "__main__":
    main()
