"""Slipway installed from its wheel, in an environment that does not see the checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.conftest import ROOT


def build_wheel(folder: Path) -> Path:
    """Build the checkout's wheel into `folder`."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run(
        [*command, "--directory", folder], cwd=ROOT, check=True, capture_output=True, timeout=120
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Install only the wheel into a new environment in `folder`; return its Python.

    All other packages are those of the tests' environment.
    """
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    python = folder / "bin/python"
    install = [*uv, "pip", "install", "--quiet", "--no-config", "--no-deps", "--offline"]
    subprocess.run([*install, "--no-cache", "--python", python, wheel], check=True)
    (site,) = folder.glob("lib/python3.*/site-packages")
    (site / "packages_of_the_tests.pth").write_text(sysconfig.get_path("purelib"))
    return python


def outside_the_checkout(folder: Path, python: Path) -> dict[str, str]:
    """Return the variables of a shell with that environment; `folder` holds BentoML's home."""
    mine = ("SLIPWAY_", "PYTHON", "PROMETHEUS_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(mine)} | {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "BENTOML_HOME": str(folder / "bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
    }
