"""Files beside the code: a pipeline and params to begin with, demo data, launchers, dashboards.

In a checkout they lie at its top, in an installed package in `slipway/assets/`.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def asset(name: str) -> Path:
    """Return the path of the file or folder `name`, relative to the checkout, such as "launch"."""
    installed = _PACKAGE / "assets"
    return (installed if installed.is_dir() else _PACKAGE.parent) / name
