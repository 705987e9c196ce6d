"""Compares the speed of Slipway's training batches with that of other data loaders.

`python -m bench.loading` installs the other loaders into .work/bench/loading/venv, makes JPEGs from
the data under ../shared/data, starts every loader once, and times all of them in turns. It prints
and writes one table for each case. FFCV is compiled; it needs a C++ compiler, pkg-config,
libopencv-dev and libturbojpeg0-dev. If a loader cannot be installed or started, the table has the
reason.
"""

import io
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from bench.conditions import conditions
from bench.loading_peers import PEERS
from bench.loading_rounds import CASES, MIN_SECONDS, Case
from slipway.system import files

ROOT = Path.cwd()
SHARED = ROOT.parent / "shared" / "data"
SCRATCH = ROOT / ".work" / "bench" / "loading"
RESULT = ROOT / "bench/results/loading.md"
NUM_ROUNDS = 5
NUM_IMAGES = {"P1": 2048, "P2": 10240}
SETUPS = {"Slipway, in the trainer": 0, "Slipway, 2 loader processes": 2}
PACKAGES = (
    (
        "torch==2.14.1",
        "torchvision==0.29.2",
        "opencv-python-headless",
        "pillow",
        "setuptools",
        "wheel",
    ),
    ("datasets",),
    ("webdataset",),
    ("litdata",),
    ("mosaicml-streaming",),
    ("nvidia-dali-cuda120",),
    (
        "numba",
        "pytorch-pfn-extras",
        "assertpy",
        "fastargs",
        "terminaltables",
        "psutil",
        "tqdm",
        "pandas",
    ),
    ("--no-deps", "--no-build-isolation", "ffcv"),  # its dependencies contain a second OpenCV
)


@dataclass
class Loader:
    """One loader in its own process, and its speed in each round."""

    name: str
    process: subprocess.Popen[str]
    failure: str = ""
    rates: list[float] = field(default_factory=list)

    def start(self) -> None:
        """Wait until the loader is ready."""
        self.failure = "" if (answer := self._answer(("ready", "failed"))) == "ready" else answer

    def round(self) -> None:
        """Time one round."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        answer = self._answer(("rate",))
        if answer.startswith("rate"):
            self.rates.append(float(answer.split()[1]))
        else:
            self.failure = answer

    def _answer(self, beginnings: tuple[str, ...]) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # libraries print, too
            if line.startswith(beginnings):
                return line.strip()
        return f"failed: ended with status {self.process.wait()}"

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def install() -> Path:
    """Install the other loaders; return their Python. A failed installation shows at import."""
    python = SCRATCH / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run(
            ["uv", "venv", "--python", sys.executable, str(SCRATCH / "venv")], check=True
        )
        for packages in PACKAGES:
            subprocess.run(
                ["uv", "pip", "install", "--python", str(python), *packages], check=False
            )
    return python


def write_images(case: Case, folder: Path) -> None:
    """Write JPEGs of 400x300 from photographs of cells, or of 28 px from CIFAR-10."""
    if (folder / "images").exists():
        return
    with files.new_directory(folder / "images") as images:
        for label in ("0", "1"):
            (images / label).mkdir()
        for number, picture in enumerate(_crops() if case.size_px == 224 else _small()):
            if number == NUM_IMAGES[case.name]:
                break
            picture.save(images / str(number % 2) / f"{number:06}.jpg", quality=90)


def _crops() -> Iterator[Image.Image]:
    photographs = [
        Image.open(path).convert("RGB")
        for path in sorted((SHARED / "bccd" / "images").glob("*.jpg"))
    ]
    generator = np.random.default_rng(0)
    while True:
        photograph = photographs[generator.integers(len(photographs))]
        left, top = (
            int(generator.integers(photograph.width - 400 + 1)),
            int(generator.integers(photograph.height - 300 + 1)),
        )
        yield photograph.crop((left, top, left + 400, top + 300))


def _small() -> Iterator[Image.Image]:
    column = pq.read_table(SHARED / "cifar10" / "train.parquet").slice(0, NUM_IMAGES["P2"])["image"]
    for value in column.to_pylist():
        yield (
            Image.open(io.BytesIO(value["bytes"] if isinstance(value, dict) else value))
            .convert("RGB")
            .resize((28, 28))
        )


def start_all(case: Case, folder: Path, python: Path) -> list[Loader]:
    """Start every loader, and return them when all are ready or failed."""
    commands = {
        name: [sys.executable, "-m", "bench.loading_slipway", case.name, str(folder), str(workers)]
        for name, workers in SETUPS.items()
    }
    commands |= {
        name: [str(python), "bench/loading_peers.py", name, case.name, str(folder)]
        for name in PEERS
    }
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    loaders = []
    for name, command in commands.items():
        with (SCRATCH / "errors.log").open("a") as errors:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=-1, stdout=-1, stderr=errors, text=True
            )
        loaders.append(Loader(name, process))
    for loader in loaders:
        loader.start()
        print(f"{case.name} {loader.name}: {loader.failure or 'ready'}", flush=True)
    return loaders


def measure(case: Case, python: Path) -> list[str]:
    """Measure one case; return its table."""
    folder = SCRATCH / case.name
    folder.mkdir(parents=True, exist_ok=True)
    write_images(case, folder)
    loaders = start_all(case, folder, python)
    for number in range(NUM_ROUNDS):
        for loader in loaders:
            if not loader.failure:
                loader.round()
        rates = ", ".join(
            f"{loader.name} {loader.rates[-1]:,.0f}" for loader in loaders if loader.rates
        )
        print(f"{case.name} round {number + 1} of {NUM_ROUNDS}: {rates}", flush=True)
    for loader in loaders:
        loader.process.kill()
        loader.process.wait()
    return _table(loaders)


def _table(loaders: list[Loader]) -> list[str]:
    base = next(
        (loader.median for loader in loaders if loader.name == "ImageFolder" and loader.rates),
        float("nan"),
    )
    lines = [
        "| Loader | images/s, median | lowest | highest | x ImageFolder |",
        "|---|---|---|---|---|",
    ]
    for loader in sorted(loaders, key=lambda one: -one.median if one.rates else 0.0):
        if loader.failure or not loader.rates:
            lines.append(f"| {loader.name} | not run: {loader.failure} | | | |")
        else:
            figures = " | ".join(
                f"{value:,.0f}" for value in (loader.median, min(loader.rates), max(loader.rates))
            )
            lines.append(f"| {loader.name} | {figures} | {loader.median / base:.1f} |")
    medians = {loader.name: loader.median for loader in loaders if loader.rates}
    if {OURS, PEER} <= medians.keys():
        lines += ["", f"{OURS} is {medians[OURS] / medians[PEER]:.1f} times {PEER}."]
    return lines


OURS, PEER = "Slipway, in the trainer", "FFCV raw, at most 256 px"  # the same pixels
TITLES = {
    "P1": "## 224 px from JPEGs of 400x300\n\n"
    "Random resized crop (8 % to 100 % of the area) and flip, shuffled, batches of 64. "
    "Slipway and FFCV raw read decoded pixels (stored with 256 px, and with up to 400 or 256 px); "
    "the others decode a JPEG for each sample and epoch.",
    "P2": "## 28 px\n\nRandom crop after padding by 4 pixels and flip, shuffled, batches of 256.",
}


def main() -> None:
    """Run the cases of the command line, or both. Earlier results of other cases stay."""
    SCRATCH.mkdir(parents=True, exist_ok=True)
    python = install()
    for name in sys.argv[1:] or CASES:
        there = (SHARED / ("bccd" if name == "P1" else "cifar10")).exists()
        table = (
            measure(CASES[name], python)
            if there
            else ["Not run: the data is not beside this checkout, under ../shared/data."]
        )
        versions = conditions("torch", "numpy", "opencv-python-headless")
        files.write_text(
            SCRATCH / f"{name}.md", "\n".join([TITLES[name], "", *table, "", versions, ""])
        )
    parts = [path.read_text() for name in CASES if (path := SCRATCH / f"{name}.md").exists()]
    files.write_text(RESULT, "\n".join(["# Loading training batches\n", *parts, f"{NOTE}\n"]))
    print(RESULT.read_text())


NOTE = f"""Loaders took turns, n = {NUM_ROUNDS} rounds of {MIN_SECONDS:g} s, without the batches
that were ready before; 2 workers or threads each; everything in the page cache. Slipway and FFCV
return bytes, which become floats on the device; the others return floats."""


if __name__ == "__main__":
    main()
