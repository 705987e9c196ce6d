"""Measures the size of the service's environment, and the time in which uv and pip install it.

`python -m bench.environment_size` builds the wheel and installs it with uv into temporary
environments: `slipway-ml[serve-cpu]`, `slipway-ml[serve]`, and the lock of a bento's image. It
writes one table. Versions are those of requirements.lock; each package is checked against its hash
on the package index. The size is that of all files, in MB of 1,000,000 bytes. Then uv and pip
install `serve-cpu` in turns, each with an empty cache; ROUNDS=0 leaves this out.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.conditions import conditions
from slipway.system import files
from tests.installed import build_wheel
from tests.serving.server import ROOT

ROUNDS = int(os.environ.get("ROUNDS", "3"))
RESULT = Path("bench/results/environment_size.md")
TARGETS_MB = {"serve-cpu": 500, "serve": 750}
IMAGE_LOCK = ROOT / "launch/requirements.cpu.lock"
NUM_LARGEST = 5
UV = [sys.executable, "-m", "uv"]


@dataclass(frozen=True)
class Environment:
    """The measured size of an environment, in MB."""

    name: str
    target_mb: int
    plain_mb: float
    compiled_mb: float
    packages: int
    largest: list[tuple[str, float]]  # name in site-packages, MB

    def row(self) -> str:
        largest = ", ".join(f"{name} {size:.0f}" for name, size in self.largest)
        return (
            f"| {self.name} | {self.plain_mb:.0f} MB | {self.compiled_mb:.0f} MB | "
            f"{self.target_mb} MB | {self.packages} | {largest} |"
        )


def locked(wheel: Path, extra: str, folder: Path) -> Path:
    """Write a lock with hashes of the wheel's dependencies for `extra`, without the wheel."""
    wanted, lock = folder / f"{extra}.in", folder / f"{extra}.lock"
    wanted.write_text(f"slipway-ml[{extra}] @ {wheel.as_uri()}\n")
    versions = [ROOT / "requirements.lock", IMAGE_LOCK]
    run(
        *(*UV, "pip", "compile", "--no-config", "--generate-hashes", "--quiet"),
        *("--no-emit-package", "slipway-ml", "--python", sys.executable, "--output-file", lock),
        *(part for path in versions for part in ("--constraint", path)),
        wanted,
    )
    return lock


def new_environment(folder: Path) -> Path:
    """Create an empty environment; return its Python."""
    run(*UV, "venv", "--quiet", "--clear", "--python", sys.executable, folder)
    return folder / "bin/python"


def install_with_uv(python: Path, lock: Path, cache: Path) -> None:
    run(
        *(*UV, "pip", "sync", "--no-config", "--quiet", "--require-hashes"),
        *("--cache-dir", cache, "--python", python, lock),
    )


def install_with_pip(python: Path, lock: Path) -> None:
    """Install a lock with pip, ignoring pip's settings on this machine."""
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-cache-dir"),
        *("--require-hashes", "--requirement", lock),
    )


def run(*command: object) -> None:
    """Run a command, ignoring pip's settings; raises if it fails."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    subprocess.run(
        [str(part) for part in command], check=True, env=settings | {"PIP_CONFIG_FILE": os.devnull}
    )


def measured(name: str, target_mb: int, wheel: Path, lock: Path, folder: Path) -> Environment:
    """Install a lock and the wheel, and measure the environment; fails if it contains torch."""
    python = new_environment(folder / "environment")
    install_with_uv(python, lock, folder / "cache")
    run(*UV, "pip", "install", "--quiet", "--no-config", "--no-deps", "--python", python, wheel)
    run(python, "-B", "-c", "import slipway.serving.service")
    torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    run(python, "-B", "-c", torch)
    plain_mb = megabytes(folder / "environment")
    (site,) = (folder / "environment").glob("lib/python3.*/site-packages")
    run(python, "-m", "compileall", "-q", site)
    return Environment(
        name,
        target_mb,
        plain_mb,
        megabytes(folder / "environment"),
        packages=len(list(site.glob("*.dist-info"))),
        largest=sorted(
            ((path.name, megabytes(path)) for path in site.iterdir() if path.is_dir()),
            key=lambda entry: -entry[1],
        )[:NUM_LARGEST],
    )


def megabytes(folder: Path) -> float:
    """Return the size of all files below a folder in MB; links do not count."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in found) / 1e6


def seconds_of_both(lock: Path, folder: Path) -> dict[str, list[float]]:
    """Measure the seconds of uv and pip in turns, into empty environments from empty caches."""
    seconds: dict[str, list[float]] = {"uv": [], "pip": []}
    for turn in range(ROUNDS):
        for name in sorted(seconds, reverse=turn % 2 == 0):
            python = new_environment(folder / "timed")
            started = time.perf_counter()
            if name == "uv":
                install_with_uv(python, lock, folder / f"cache{turn}")
            else:
                install_with_pip(python, lock)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def timed_part(seconds: dict[str, list[float]]) -> str:
    rows = "\n".join(
        f"| {name} | {statistics.median(values):.0f} s | {min(values):.0f} s | "
        f"{max(values):.0f} s |"
        for name, values in seconds.items()
    )
    ratio = statistics.median(seconds["uv"]) / statistics.median(seconds["pip"])
    return (
        f"\nInstallation of `serve-cpu` from its lock, empty cache, n = {ROUNDS} in turns:\n\n"
        f"| | median | lowest | highest |\n|---|---|---|---|\n{rows}\n\n"
        f"uv takes {ratio:.0%} of pip's time. pip also writes bytecode.\n"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        wheel = build_wheel(folder)
        locks = {extra: locked(wheel, extra, folder) for extra in TARGETS_MB}
        environments = [
            measured(f"`slipway-ml[{extra}]`", target, wheel, locks[extra], folder)
            for extra, target in TARGETS_MB.items()
        ]
        name = "a bento's image, `launch/requirements.cpu.lock`"
        environments.append(measured(name, TARGETS_MB["serve-cpu"], wheel, IMAGE_LOCK, folder))
        times = seconds_of_both(locks["serve-cpu"], folder) if ROUNDS else {}
    rows = "\n".join(one.row() for one in environments)
    text = (
        "# Size of the service's environment\n\n"
        "| environment | installed | with bytecode | target | packages | largest, with bytecode |\n"
        f"|---|---|---|---|---|---|\n{rows}\n\n"
        "No torch in any: the script checks it, and imports the service.\n"
        + (timed_part(times) if times else "")
        + f"\n{conditions('uv', 'pip')} Packages have the versions of requirements.lock.\n"
    )
    files.write_text(RESULT, text)
    print(text)


if __name__ == "__main__":
    main()
