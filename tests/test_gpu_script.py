"""bench/gpu.py on the CPU: the script has to work the first time that a GPU is there."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu
from tests.training.real_runs import environment
from tests.training.slurm_cluster import wait_until

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


def test_a_section_replaces_only_the_section_of_its_part(tmp_path: Path) -> None:
    result = tmp_path / "gpu.md"
    gpu.write_section(result, "A100", "Rates", "| float32 | 1 |\n\nMeasured alone.\n")
    gpu.write_section(result, "A100", "Tests", "* passed `a`\n")
    gpu.write_section(result, "H200", "Rates", "| float32 | 2 |\n")
    assert result.read_text() == (
        "# On a GPU: H200\n\n## Rates\n\n| float32 | 2 |\n\n## Tests\n\n* passed `a`\n"
    )


@pytest.mark.process
def test_a_part_that_is_cut_off_keeps_its_lines_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "WRITE_S", 0.2)
    lines, written = tmp_path / "part.md", list[str]()
    script = f"echo $$ > {tmp_path}/pid; echo '| row | 1 |' >> {lines}; sleep 60 & wait"
    section = gpu.run_limited(["bash", "-c", script], lines, 2.0, written.append)
    assert section.startswith("| row | 1 |\n\nEnded at its limit of 2 s.\n")
    assert written[-1] == "| row | 1 |\n\nNot finished.\n"
    group = (tmp_path / "pid").read_text().strip()
    alive = ["pgrep", "--pgroup", group, "--runstates", "D,R,S"]
    wait_until(lambda: subprocess.run(alive).returncode == 1, "the end of the group", 20)


@pytest.mark.process
def test_a_part_that_fails_has_its_lines_and_no_limit_in_its_section(tmp_path: Path) -> None:
    lines = tmp_path / "part.md"
    script = f"echo '| row | 1 |' >> {lines}; exit 3"
    section = gpu.run_limited(["bash", "-c", script], lines, 60, lambda text: None)
    assert section.startswith("| row | 1 |\n\n")
    assert "limit" not in section
