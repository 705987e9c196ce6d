"""Describes the machine and the package versions of a measurement, for the line below a table."""

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version

from slipway.system.cores import cpu_model


def conditions(*packages: str) -> str:
    """Return the date, processor, Python, versions of `packages`, and load as one line."""
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
