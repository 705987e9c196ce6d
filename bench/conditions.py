"""The machine and the versions behind a figure: the line below every table."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version

from slipway.system.cores import cpu_model


def conditions(*packages: str) -> str:
    """Date, processor, Python, the versions of `packages`, and the load."""
    versions = ", ".join(f"{name} {_installed(name)}" for name in packages)
    machine = f"{os.cpu_count()} cores of {cpu_model()} ({platform.machine()}, {platform.system()})"
    load = f"load average at the end {os.getloadavg()[0]:.1f}"
    return (
        f"{time.strftime('%Y-%m-%d')}, {machine}, Python {platform.python_version()}, {versions}; "
        f"{load}."
    )


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
