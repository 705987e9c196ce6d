"""Counts our modules that the service imports while its list of extensions is empty."""

import subprocess
import sys
from pathlib import Path

MOST_CORE_MODULES = 60
_COUNT = """
import sys, types
extensions = types.ModuleType("slipway.serving.extensions")
extensions.EXTENSIONS = extensions.SECTIONS = ()
sys.modules["slipway.serving.extensions"] = extensions
import slipway.serving.service
print(sum(name.split(".")[0] == "slipway" for name in sys.modules))
"""


def num_core_modules(root: Path) -> int:
    """Return the number of our modules that a fresh interpreter then has in `sys.modules`."""
    command = [sys.executable, "-c", _COUNT]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])
