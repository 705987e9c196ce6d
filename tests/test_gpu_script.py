"""bench/gpu.py on the CPU: the script has to work the first time that a GPU is there."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.real_runs import environment

ROOT = Path(__file__).parents[1]
ROWS = {  # of parts that need no service, with the rows of their tables
    "transformer": ("| single | none | ",),
    "strategies": ("| deepspeed_stage_1 | none | 16-mixed | ", "| deepspeed_stage_2 | none | "),
    "rates": ("| float32 | ", "| float16 | ", "| bfloat16 | "),
}
FAULTS = ("failed:", "Ended at its limit", "Nothing was measured")


@pytest.mark.nightly(seconds=105)
def test_parts_of_the_gpu_script_fill_their_tables_on_a_cpu() -> None:
    command = [sys.executable, "-m", "bench.gpu", "--cpu", *ROWS]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, timeout=900
    )
    missing = [row for rows in ROWS.values() for row in rows if f"\n{row}" not in done.stdout]
    faults = [fault for fault in FAULTS if fault in done.stdout]
    assert (done.returncode, missing, faults) == (0, [], []), done.stdout
