"""Measures the gain of each step: packed store, half precision, more processes, ZeRO-2.

`make ladder` (`python -m bench.ladder`) makes JPEGs like photographs, and frames like those of
videos. It trains on them naively and through Slipway, in turns, with and without an expensive
function on each image. It prints and writes one table and a picture. Each row names the row that
it is compared with. If this machine lacks the hardware for a row, the row says so. `--only NAME`
measures the rows of one data set, and writes them to a file of its own.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import matplotlib
import torch
from PIL import Image

from bench.conditions import conditions
from bench.ladder_data import (
    DATA_SETS,
    NUM_ROWS,
    cut_out,
    denoise,
    pack_images,
    write_frames,
    write_images,
)
from slipway.profiling.measured_run import MeasuredRun, ProfiledProject
from slipway.profiling.profile import describe_machine
from slipway.system import files
from slipway.system.cores import num_cores
from slipway.system.errors import TrainingError
from tests.project_params import PROJECT

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a smaller file
ROOT = Path.cwd()
SCRATCH = ROOT / ".work/bench/ladder"
RESULTS = ROOT / "bench/results"
NUM_ROUNDS = 5
BATCH_SIZE = 32
NO_GPU = "not executed: no GPU"
FUNCTIONS = {"denoised": denoise, "video": cut_out}
PUBLISHED = "3.63x by four GPUs, 13.29x by preprocessing once, 21.53x by all together"


class Runner(Protocol):
    """A training whose speed is measured in turns with others."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...

    def rate(self) -> float:
        """Run one round; return its rows per second."""
        ...


class Naive:
    """`bench.ladder_naive` in its own process group.

    It is stopped between its turns, because its workers would load the next batches meanwhile.
    """

    def __init__(self, data_set: str) -> None:
        self._command = [
            sys.executable,
            "-m",
            "bench.ladder_naive",
            str(SCRATCH),
            str(BATCH_SIZE),
            str(num_cores()),
            data_set,
        ]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answer("ready")
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *error: Any) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def rate(self) -> float:
        """Run one round; return its rows per second."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._answer("rate")
        self._signal(signal.SIGSTOP)
        return float(answer.split()[1])

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, beginning: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line
        raise TrainingError(f"the naive training ended with status {self._process.wait()}")


class Ours:
    """The training that `slipway.stages.train` would run, on the packed store."""

    def __init__(self, name: str, folder: Path, train: dict[str, Any]) -> None:
        params = PROJECT.model_copy(
            update={"train": PROJECT.train.model_copy(update={"batch_size": BATCH_SIZE})}
        )
        project = ProfiledProject(
            params, folder / "packed", folder / "augmented", ROOT, SCRATCH / "runs"
        )
        self._run = MeasuredRun(project, name, **train)

    def __enter__(self) -> Self:
        self._run.__enter__()
        self._run.time_steps()  # warm-up
        return self

    def __exit__(self, *error: Any) -> None:
        self._run.__exit__(None, None, None)

    def rate(self) -> float:
        """Run one round; return its rows per second."""
        return BATCH_SIZE / self._run.time_steps().step_ms * 1000


@dataclass
class Row:
    """A row of the table: a kind of training, and the row that it is compared with."""

    key: str
    name: str
    baseline: str | None
    train: dict[str, Any] | None = None  # None for the naive training
    data_set: str = "plain"
    missing: str = ""
    rates: list[float] = field(default_factory=list)

    def runner(self) -> Runner:
        """Create the runner, without starting it."""
        if self.train is None:
            return Naive(self.data_set)
        return Ours(self.key, SCRATCH / f"packed {self.data_set}", self.train)


def rows() -> list[Row]:
    """Return all rows of the ladder; a row that cannot run here has the reason."""
    gpus = torch.cuda.device_count()
    one = {"strategy": "single", "devices": 1, "precision": "32-true", "accelerator": "cpu"}
    bf16 = {**one, "precision": "bf16-mixed", "channels_last": False}
    two = {**one, "strategy": "ddp", "devices": 2}
    gpu = {"accelerator": "gpu", "devices": 1, "strategy": "single", "precision": "16-mixed"}
    zero = {"strategy": "deepspeed_stage_2"}
    no_gpu = "" if gpus else NO_GPU
    several = (
        "" if gpus > 1 else NO_GPU if not gpus else f"not executed: {gpus} GPU, several are needed"
    )
    many = max(gpus, 2)
    return [
        Row(
            "naive",
            f"naive: decode and resize each sample, {num_cores()} workers, fp32, 1 process",
            None,
        ),
        Row("packed", "packed store, fp32, 1 process", "naive", one),
        Row(
            "naive denoised",
            f"naive with the expensive function, {num_cores()} workers, fp32, 1 process",
            None,
            data_set="denoised",
        ),
        Row(
            "packed denoised",
            "packed store, the function precomputed, fp32, 1 process",
            "naive denoised",
            one,
            "denoised",
        ),
        Row(
            "naive video",
            f"naive on frames: find and cut out the object, {num_cores()} workers, fp32, 1 process",
            None,
            data_set="video",
        ),
        Row(
            "packed video",
            "packed store of frames, objects cut out once, fp32, 1 process",
            "naive video",
            one,
            "video",
        ),
        Row("bf16", "packed store, bf16-mixed on the CPU, channels_last false", "packed", bf16),
        Row("ddp", "packed store, 2 DDP processes on the CPU", "packed", two),
        Row(
            "zero 2",
            "packed store, 2 processes, ZeRO-2 on the CPU",
            "ddp",
            {**two, "strategy": "deepspeed_stage_2"},
        ),
        Row(
            "gpu fp32",
            "packed store, 1 GPU, fp32",
            "packed",
            {**gpu, "precision": "32-true"},
            missing=no_gpu,
        ),
        Row("gpu fp16", "packed store, 1 GPU, fp16", "gpu fp32", gpu, missing=no_gpu),
        Row(
            "gpu bf16",
            "packed store, 1 GPU, bf16",
            "gpu fp32",
            {**gpu, "precision": "bf16-mixed"},
            missing=no_gpu,
        ),
        Row(
            "gpus",
            "packed store, every GPU, DDP, fp16",
            "gpu fp16",
            {**gpu, "devices": many, "strategy": "ddp"},
            missing=several,
        ),
        Row(
            "gpus zero 2",
            "packed store, every GPU, ZeRO-2, fp16",
            "gpus",
            {**gpu, "devices": many, **zero},
            missing=several,
        ),
        Row(
            "gpu all",
            "all: function precomputed, 1 GPU, ZeRO-2, fp16",
            "naive denoised",
            {**gpu, **zero},
            "denoised",
            no_gpu,
        ),
        Row(
            "gpu video",
            "all on frames: objects cut out once, 1 GPU, ZeRO-2, fp16",
            "naive video",
            {**gpu, **zero},
            "video",
            no_gpu,
        ),
    ]


def measure(ladder: list[Row]) -> None:
    """Measure all rows that can run, in turns."""
    with ExitStack() as stack:
        runners: dict[str, Runner] = {}
        for row in ladder:
            if row.missing:
                continue
            try:
                runners[row.key] = stack.enter_context(row.runner())
            except TrainingError as error:
                row.missing = f"not executed: {str(error).splitlines()[-1].strip()}"
        for number in range(NUM_ROUNDS):
            for row in ladder:
                if row.key in runners:
                    row.rates.append(runners[row.key].rate())
            print(
                f"round {number + 1} of {NUM_ROUNDS}: "
                + ", ".join(f"{row.key} {row.rates[-1]:,.0f}" for row in ladder if row.rates),
                flush=True,
            )


def gains(row: Row, ladder: list[Row]) -> list[float]:
    """Return the speed relative to the baseline, by round; empty if either did not run."""
    base = next((other for other in ladder if other.key == row.baseline), None)
    return (
        [mine / theirs for mine, theirs in zip(row.rates, base.rates, strict=True)]
        if base and base.rates and row.rates
        else []
    )


def table(ladder: list[Row]) -> str:
    """Format the results as a Markdown table."""
    lines = [
        (
            "| | Training | rows/s, median | lowest to highest | compared with | times as fast | "
            "lowest to highest |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    places = {row.key: str(number) for number, row in enumerate(ladder, 1)}
    for row in ladder:
        start = f"| {places[row.key]} | {row.name} |"
        if not row.rates:
            lines.append(f"{start} {row.missing} | | {places.get(row.baseline or '', '')} | | |")
            continue
        found, rates = (
            gains(row, ladder),
            (
                f"{_rate(statistics.median(row.rates))} | {_rate(min(row.rates))} to "
                f"{_rate(max(row.rates))}"
            ),
        )
        gain = (
            f"{statistics.median(found):.2f} | {min(found):.2f} to {max(found):.2f}"
            if found
            else " | "
        )
        lines.append(f"{start} {rates} | {places.get(row.baseline or '', '')} | {gain} |")
    return "\n".join(lines)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def draw(ladder: list[Row], path: Path) -> None:
    """Draw rows per second as bars on a log scale, with ranges, and the rows that did not run."""
    from matplotlib import pyplot

    shown = list(enumerate(ladder, 1))[::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(ladder) + 1.1), layout="constrained")
    axes.set_xscale("log")
    floor = min(min(row.rates) for row in ladder if row.rates) / 2
    for place, (_, row) in enumerate(shown):
        if not row.rates:
            axes.text(floor * 1.05, place, row.missing, va="center", fontsize=8, color="#667085")
            continue
        median = statistics.median(row.rates)
        colour = "#c2410c" if row.train is None else "#2563eb"
        axes.barh(place, median - floor, left=floor, height=0.62, color=colour)
        axes.plot([min(row.rates), max(row.rates)], [place, place], color="#1b2330", linewidth=1.2)
        found = gains(row, ladder)
        base = next(
            (number for number, other in enumerate(ladder, 1) if other.key == row.baseline), 0
        )
        note = f"  {statistics.median(found):.2f}x row {base}" if found else ""
        axes.text(max(row.rates) * 1.05, place, f"{_rate(median)}{note}", va="center", fontsize=8)
    axes.set_yticks(
        range(len(shown)), [f"{number}  {row.name}" for number, row in shown], fontsize=8
    )
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlim(floor, max(max(row.rates) for row in ladder if row.rates) * 6)
    axes.set_xlabel("rows per second")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def prepare(names: Iterable[str]) -> str:
    """Make the images, frames and stores of these data sets; return their costs in words."""
    texts = []
    for name in names:
        data_set = DATA_SETS[name]
        make = write_frames if name == "video" else write_images
        make(SCRATCH / data_set.folder)
        begin = time.perf_counter()
        pack_images(SCRATCH / data_set.folder, SCRATCH / f"packed {name}", data_set)
        texts.append(f"{name} {time.perf_counter() - begin:.1f} s")
        if name in FUNCTIONS:
            cost = _processor_ms(FUNCTIONS[name], data_set.folder)
            texts[-1] += f", of which the function takes {cost:.0f} ms of processor time an image"
    number = sum(NUM_ROWS.values())
    return f"Packing the {number} images of each data set, once: {'; '.join(texts)}."


def _processor_ms(function: Callable[[Image.Image], Any], folder: str) -> float:
    """Return the processor time of the function for one image, without decoding it."""
    images = [Image.open(path).copy() for path in sorted((SCRATCH / folder / "test").rglob("*.*"))]
    begin = time.process_time()
    for image in images:
        function(image)
    return (time.process_time() - begin) * 1000 / len(images)


def main() -> None:
    """Prepare, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=DATA_SETS, help="the rows of this data set")
    only = parser.parse_args().only
    packing = prepare([only] if only else DATA_SETS)
    ladder = [row for row in rows() if only in (None, row.data_set)]
    measure(ladder)
    text = table(ladder)
    print(text)
    name = f"ladder_{only}" if only else "ladder"
    draw(ladder, RESULTS / f"{name}.svg")
    versions = conditions(
        "torch", "torchvision", "pytorch-lightning", "deepspeed", "opencv-python-headless"
    )
    body = (
        f"{text}\n\n![rows per second]({name}.svg)\n\n{NOTE}\n\n{packing}\n\n"
        f"{describe_machine()}\n\n{versions}"
    )
    files.write_text(RESULTS / f"{name}.md", f"# The ladder: what each step gains\n\n{body}\n")


NOTE = f"""JPEGs of 400x300 like photographs, trained at 32 px in batches of {BATCH_SIZE} with
padded crops and flips, `small_resnet` of params.yaml; steps only, without validation.
n = {NUM_ROUNDS} rounds of about a second each, all rows in turns. The naive training is stopped
between its rounds, and batches that were ready before a round do not count. A gain is the median of
the rounds' ratios to the named row: gains of different rows must not be multiplied.

The naive training is torchvision's `ImageFolder` and `DataLoader` with persistent worker processes,
one per core, and a plain loop in fp32. It reads, decodes, transforms and resizes every image in
every epoch. The expensive function is OpenCV's non-local means denoising (patches of 5 px, a window
of 11 px), which `precompute.transform` runs once for each image.

The frames are PNGs of 640x360 with one bright polygon on an uneven ground, turned and moved at
random in each epoch. Their function finds the object with OpenCV's GrabCut in a copy a quarter as
large, refines the corners of its hull in the frame, blackens everything outside the hull, and crops
with a margin of 30 % ([video.md](../../docs/how-to/video.md)). Their baseline is the naive training
that does this for each sample in each epoch.

The figures that were published for such a ladder: {PUBLISHED}. They do not
multiply either, and are of another machine and other data."""


if __name__ == "__main__":
    main()
