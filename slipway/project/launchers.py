"""Writes the script that trains a project on several machines, from the templates in `launch/`."""

import shlex
import sys
from pathlib import Path

from slipway.system import files
from slipway.system.assets import asset
from slipway.system.errors import ParamsError


def write_script(
    name: str,
    nodes: int,
    processes: int,
    gpus: int,
    interface: str | None = None,
    setup: str = "",
) -> Path:
    """Write launch/NAME into the current folder, for this interpreter; return its path.

    `processes` and `gpus` are those of each node; `interface` is the network card between nodes,
    `setup` the command that installs Slipway on a new machine. Raises ParamsError if there is a
    file of that name, because it may have been edited.
    """
    path = Path(name)
    if path.exists():
        raise ParamsError(
            f"{name} exists, expected a new file. Edit it, or remove it and run this again."
        )
    values = {
        "nodes": str(nodes),
        "processes": str(processes),
        "gpus": str(gpus),
        # Not the file that a link of a virtual environment leads to: it has other packages.
        "bin": shlex.quote(str(Path(sys.executable).absolute().parent)),
        "interface": _interface(interface),
        "setup": setup,
    }
    template = asset(f"launch/{name}")
    text = template.read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    files.write_text(path, text)
    path.chmod(template.stat().st_mode & 0o777)
    return path


def _interface(name: str | None) -> str:
    """Return the line that chooses the network card; a guess would break a working fabric."""
    if name is None:
        return "# --interface NAME sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME here."
    quoted = shlex.quote(name)
    return f"export NCCL_SOCKET_IFNAME={quoted} GLOO_SOCKET_IFNAME={quoted}"
