"""Runs what needs a GPU, ten minutes at a time: `python -m bench.gpu [--cpu] [PART ...]`.

Each part is a separate process with a time limit. It writes its lines as it measures them, and
bench/results/gpu.md is rewritten after each part, so a part that fails or is cut off keeps its
lines so far. All parts need two runs: the first names the parts for the second. Missing data sets
and packages are reported. `--cpu` tries the script itself on the CPU with small sizes, and writes
to tmp/. CIFAR-10 is read from ../shared/data, or from the folder in the variable CIFAR10.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

from bench.conditions import conditions
from bench.gpu_parts import PARTS, SCRATCH, Machine, in_a_line
from bench.projects import ROOT
from slipway.system import files

MAX_S = 590  # of one run; a part begins only if its limit fits


def run_part(name: str, machine: Machine) -> None:
    """Run a part in this process, and write each line as it arrives."""
    place = SCRATCH / f"{name}.md"
    with place.open("w") as output:
        try:
            for line in PARTS[name].run(machine):
                output.write(f"{line}\n")
                output.flush()
        except Exception as error:  # the results say it; the other parts go on
            output.write(f"\n{in_a_line(error)}\n")
            raise


def run_limited(name: str, machine: Machine, limit_s: float) -> str:
    """Run a part in its own process group for up to `limit_s`; return its lines."""
    begin = time.perf_counter()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    (SCRATCH / f"{name}.md").write_text("")
    command = [sys.executable, "-m", "bench.gpu", "--inside", name]
    command += [] if machine.on_gpu else ["--cpu"]
    ending = ""
    with (SCRATCH / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            ending = f"\nEnded at its limit of {limit_s:.0f} s.\n"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.perf_counter() - begin
    found = (SCRATCH / f"{name}.md").read_text() or "Nothing was measured.\n"
    versions = conditions("torch", "deepspeed", "onnxruntime-gpu", "tensorrt", "bentoml")
    return f"{found}{ending}\n{seconds:.0f} s in all. {versions}\n"


def write_results(result: Path, device: str, new: dict[str, str]) -> None:
    """Write the sections by title; sections of other parts stay unchanged."""
    old = result.read_text().split("\n## ")[1:] if result.exists() else []
    sections = dict(section.split("\n\n", 1) for section in old) | new
    body = "\n".join(f"## {title}\n\n{text.rstrip()}\n" for title, text in sections.items())
    files.write_text(result, f"# On a GPU: {device}\n\n{body}")


def main() -> None:
    """Run all parts, or those of the command line, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--cpu", action="store_true", help="try the script with small sizes")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    given = parser.parse_args()
    machine = Machine(on_gpu=not given.cpu)
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    if given.inside:
        run_part(given.inside, machine)
        return
    if machine.on_gpu and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --cpu tries the script without one")
    result = ROOT / "bench/results/gpu.md" if machine.on_gpu else SCRATCH / "gpu.md"
    device = torch.cuda.get_device_name() if machine.on_gpu else "a trial on the CPU"
    deadline = time.perf_counter() + MAX_S * machine.size(1, 4)
    left = list(given.parts or PARTS)
    while left:
        name = left[0]
        limit_s = PARTS[name].seconds * machine.size(1, 4)
        if time.perf_counter() + limit_s > deadline:
            print(f"The ten minutes are over. Go on with `python -m bench.gpu {' '.join(left)}`.")
            break
        left.pop(0)
        section = run_limited(name, machine, limit_s)
        print(f"## {PARTS[name].title}\n\n{section}", flush=True)
        write_results(result, device, {PARTS[name].title: section})


if __name__ == "__main__":
    main()
