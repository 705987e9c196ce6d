"""Paths of files that ship beside the code: default pipeline and params, demo data, launchers.

In a checkout they lie at its top, in an installed package in `slipway/assets/`.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def asset(name: str) -> Path:
    """Return the path of the shipped file or folder `name`, such as "launch"."""
    installed = _PACKAGE / "assets"
    return (installed if installed.is_dir() else _PACKAGE.parent) / name
