"""Runs what needs a GPU, ten minutes at a time: `python -m bench.gpu [--cpu] [PART ...]`.

Each part is a separate process with a time limit. It writes its lines as it measures them, and
bench/results/gpu.md gets them every few seconds, so a part that fails, and a run that is cut off,
keep what was measured. A run takes the parts in order, those that still fit. It names the parts
that are left; all of them take three runs. Missing data sets and packages are reported. `--cpu`
tries the script itself on the CPU with small sizes, and writes to tmp/. CIFAR-10 is read from
../shared/data, or from the folder in the variable CIFAR10.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from bench.conditions import conditions
from bench.gpu_parts import PARTS, SCRATCH, Machine, in_a_line
from bench.projects import ROOT
from slipway.system import files

MAX_S = 590  # of one run; a part begins only if its limit fits
WRITE_S = 5.0  # between two looks at the lines of a running part


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


def run_limited(
    command: list[str], lines: Path, limit_s: float, write: Callable[[str], None]
) -> str:
    """Run a part's command in its own process group for up to `limit_s`; return its section.

    The command writes to the file `lines`. Meanwhile `write` gets the unfinished section.
    """
    begin = time.perf_counter()
    lines.parent.mkdir(parents=True, exist_ok=True)
    lines.write_text("")
    ending = f"\nEnded at its limit of {limit_s:.0f} s.\n"
    with lines.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            while (left_s := begin + limit_s - time.perf_counter()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=min(WRITE_S, left_s))
                    ending = ""
                    break
                write(f"{lines.read_text()}\nNot finished.\n")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.perf_counter() - begin
    found = lines.read_text() or "Nothing was measured.\n"
    versions = conditions("torch", "deepspeed", "onnxruntime-gpu", "tensorrt", "bentoml")
    return f"{found}{ending}\n{seconds:.0f} s in all. {versions}\n"


def write_section(result: Path, device: str, title: str, section: str) -> None:
    """Replace the section with this title; those of other parts stay unchanged."""
    old = result.read_text().split("\n## ")[1:] if result.exists() else []
    sections = dict(each.split("\n\n", 1) for each in old) | {title: section}
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
    options = [] if machine.on_gpu else ["--cpu"]
    left = []
    for name in given.parts or PARTS:
        part, limit_s = PARTS[name], PARTS[name].seconds * machine.size(1, 4)
        if time.perf_counter() + limit_s > deadline:
            left.append(name)
            continue
        command = [sys.executable, "-m", "bench.gpu", "--inside", name, *options]
        write = partial(write_section, result, device, part.title)
        section = run_limited(command, SCRATCH / f"{name}.md", limit_s, write)
        print(f"## {part.title}\n\n{section}", flush=True)
        write(section)
    if left:
        command = ["python -m bench.gpu", *options, *left]
        print(f"No time was left for the others. Go on with `{' '.join(command)}`.")


if __name__ == "__main__":
    main()
