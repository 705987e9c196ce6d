"""Installs the packages of an exported script with uv, here and for aarch64, and runs it there.

QEMU translates the instructions of aarch64. It needs the folder of an aarch64 system with Python.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipway.system import files
from slipway.system.errors import ParityError, UnavailableError

EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
# OpenVINO's wheel needs glibc 2.35: Debian 12 has a newer one, and so has the recipe's image.
_FOR_AARCH64 = ("--only-binary", ":all:", "--python-platform", "aarch64-manylinux_2_35")
# QEMU shows the /proc/cpuinfo of this machine, at which ONNX Runtime for aarch64 crashes.
_CORE = """\
processor\t: {core}
Features\t: fp asimd aes pmull sha1 sha2 crc32 cpuid
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd08
CPU revision\t: 3

"""


def install(environment: Path, requirements: Path, options: Sequence[str] = ()) -> dict[str, Any]:
    """Install the requirements in a new environment. Returns its size and other facts.

    Raises UnavailableError without uv, or if the packages cannot be installed.
    """
    python = str(environment / "bin/python")
    listed = (*options, "-r", str(requirements))
    _uv("venv", "--quiet", "--python", sys.executable, str(environment))
    _uv("pip", "install", "--quiet", "--python", python, *listed)
    packages = next(environment.glob("lib/python*/site-packages"))
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    try:
        elsewhere = ("--dry-run", "--target", str(environment / "aarch64"), *listed)
        _uv("pip", "install", "--quiet", *_FOR_AARCH64, *elsewhere)
        wheels = "all requirements have wheels"
    except UnavailableError as error:
        wheels = str(error)
    return {"installed_mb": size / 1e6, "aarch64_wheels": wheels}


def emulated_lines(
    folder: Path, rows: Path, system: Path | None, options: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Run the script of an export on the files in `rows`, on aarch64. Returns what it prints.

    `system` is the folder of an aarch64 system, whose Python runs the script.

    Raises:
        UnavailableError: there is no such system, no emulator, or no package for aarch64.
        ParityError: the script fails there.
    """
    if system is None:
        raise UnavailableError("no --aarch64-system was given")
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if emulator is None:
        raise UnavailableError(
            f"none of {', '.join(EMULATORS)} is here, expected one: "
            "apt-get install qemu-user-static"
        )
    python = system.absolute() / "usr/bin/python3"
    if not python.exists():
        raise UnavailableError(
            f"{system} has no usr/bin/python3, expected an aarch64 system with Python"
        )
    with tempfile.TemporaryDirectory() as scratch:
        packages, prefix = Path(scratch) / "packages", Path(scratch) / "system"
        _uv(
            *("pip", "install", "--quiet", *_FOR_AARCH64, "--target", str(packages), *options),
            *("--python-version", python.resolve().name.removeprefix("python")),
            *("-r", str(folder / "requirements.txt")),
        )
        (prefix / "proc").mkdir(parents=True)
        for part in ("lib", "usr"):  # the script's folder may be in `tmp` or `home`, here only
            (prefix / part).symlink_to(system.absolute() / part)
        cores = [_CORE.format(core=core) for core in range(os.cpu_count() or 1)]
        files.write_text(prefix / "proc/cpuinfo", "".join(cores))
        done = subprocess.run(
            [emulator, "-L", str(prefix), str(python), str(folder / "run.py"), str(rows)],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"},
        )
    if done.returncode:
        raise ParityError(
            f"run.py fails on aarch64, with {done.returncode} under {Path(emulator).name}: "
            f"{(done.stdout + done.stderr)[-300:].strip()}; expected predictions. Export without "
            "--aarch64-system, and report this message."
        )
    return list(map(json.loads, done.stdout.splitlines()))


def _uv(*arguments: str) -> None:
    command = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if command is None:
        raise UnavailableError("there is no uv here, expected one: pip install uv")
    quiet = os.environ | {"UV_NO_PROGRESS": "1"}
    done = subprocess.run([command, *arguments], capture_output=True, text=True, env=quiet)
    if done.returncode:
        raise UnavailableError(
            f"uv {' '.join(arguments[:2])} failed: {' '.join(done.stderr.split())[-300:]}"
        )
