"""What a figure was measured on and with: the line below every table."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version


def conditions(*packages: str) -> str:
    """Date, cores, Python and the versions of `packages`."""
    versions = ", ".join(f"{name} {_installed(name)}" for name in packages)
    machine = f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()})"
    load = f"load average at the end {os.getloadavg()[0]:.1f}"
    return f"{time.strftime('%Y-%m-%d')}, {machine}, Python {platform.python_version()}, {versions}; {load}."


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
