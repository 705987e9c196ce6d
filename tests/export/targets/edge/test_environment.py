"""The packages of an exported script, and its run on aarch64 under QEMU or a fake of it."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from slipway.export.targets.edge.environment import EMULATORS, emulated_lines, install
from slipway.export.targets.edge.export import EDGE, run_on_aarch64, write_files, write_script
from slipway.export.targets.exported import ExportSource
from slipway.system.errors import ParityError, UnavailableError
from tests.export.targets.sources import image_source, photo, photos

SYSTEM = "AARCH64_SYSTEM"
EMULATOR = f"""#!/bin/sh
# Runs the script with this machine's Python, if the system is laid out as QEMU needs it.
[ "$1" = -L ] && [ -e "$2/usr/bin/python3" ] && /bin/grep -q 'CPU part' "$2/proc/cpuinfo" || exit 3
[ -n "$PYTHONPATH" ] && [ ! -e "$2/home" ] || exit 4
shift 3
exec {sys.executable} "$@"
"""
SWAPPED = "np.asarray(image, np.uint8)[..., ::-1]"


def test_without_uv_the_packages_cannot_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UnavailableError, match="there is no uv here"):
        install(tmp_path / "environment", tmp_path / "requirements.txt")


def command(folder: Path, name: str, text: str = "#!/bin/sh\n") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def aarch64_system(folder: Path) -> Path:
    """Return a folder that looks like a system with Python 3.13, which a machine may not run."""
    (folder / "usr/bin").mkdir(parents=True)
    (folder / "usr/bin/python3.13").write_bytes(b"\x7fELF")
    (folder / "usr/bin/python3").symlink_to("python3.13")
    for name in ("proc", "lib", "home"):
        (folder / name).mkdir()
    return folder


@pytest.mark.parametrize(
    ("emulators", "has_system", "reason"),
    [
        (EMULATORS, False, "no --aarch64-system was given"),
        ((), True, "none of qemu-aarch64-static, qemu-aarch64 is here, expected one: apt-get "),
        (EMULATORS[1:], True, "has no usr/bin/python3, expected an aarch64 system with Python"),
    ],
    ids=["no system", "no emulator", "no Python"],
)
def test_run_on_aarch64_is_recorded_as_skipped_with_the_reason(
    emulators: tuple[str, ...],
    has_system: bool,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in emulators:
        command(tmp_path / "bin", name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    source = image_source(tmp_path / "source", photos(2))
    found = run_on_aarch64(tmp_path, source, EDGE, tmp_path if has_system else None)
    assert isinstance(found, str)
    assert found.startswith("skipped: ")
    assert reason in found


@pytest.fixture(name="exported")
def _exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ExportSource, Path]:
    """An exported folder, on a machine with a fake emulator and a uv that installs nothing."""
    command(tmp_path / "bin", "qemu-aarch64", EMULATOR)
    command(tmp_path / "bin", "uv", f'#!/bin/sh\necho "$@" > {tmp_path}/installed\n')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    source = image_source(tmp_path / "source", photos())
    (tmp_path / "edge").mkdir()
    write_files(tmp_path / "edge", source)
    return source, aarch64_system(tmp_path / "system")


@pytest.mark.process
def test_script_on_aarch64_is_compared_with_the_certified_graph(
    exported: tuple[ExportSource, Path], tmp_path: Path
) -> None:
    source, system = exported
    found = run_on_aarch64(tmp_path / "edge", source, EDGE, system)
    assert found == {"rows": 12, "max_difference": 0.0, "flipped": []}
    installed = (tmp_path / "installed").read_text()
    assert "--only-binary :all: --python-platform aarch64-manylinux_2_35 " in installed
    assert "--python-version 3.13 " in installed
    assert list((system / "proc").iterdir()) == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("np.asarray(image, np.uint8)", SWAPPED, r"predicts otherwise on aarch64: .* expected at"),
        ("import math\n", "raise SystemExit(7)\n", "run.py fails on aarch64, with 7 under qemu"),
    ],
    ids=["swapped channels", "crash"],
)
def test_script_that_fails_or_differs_on_aarch64_is_refused(
    exported: tuple[ExportSource, Path], tmp_path: Path, before: str, after: str, message: str
) -> None:
    source, system = exported
    script = (tmp_path / "edge/run.py").read_text()
    assert before in script
    (tmp_path / "edge/run.py").write_text(script.replace(before, after))
    with pytest.raises(ParityError, match=message):
        run_on_aarch64(tmp_path / "edge", source, EDGE, system)


@pytest.mark.nightly(seconds=90)
@pytest.mark.skipif(
    SYSTEM not in os.environ or not any(map(shutil.which, EMULATORS)) or not shutil.which("uv"),
    reason=f"needs uv, QEMU (Debian: apt-get install qemu-user-static) and {SYSTEM}, the folder of "
    "an aarch64 system with Python (docs/how-to/export_edge.md)",
)
def test_script_under_qemu_predicts_as_the_certified_graph_does(tmp_path: Path) -> None:
    jpegs = [photo(90 + row, (64 + row, 48), "JPEG") for row in range(4)]
    source, system = image_source(tmp_path, [*photos(), *jpegs]), Path(os.environ[SYSTEM])
    with tempfile.TemporaryDirectory() as folder:  # the system has a folder /tmp as well
        record = write_script(Path(folder) / "edge", source, aarch64_system=system)
    if record.hop.status == "not_executed":
        pytest.skip(record.hop.reason)
    found = record.facts["aarch64_run"]
    assert (found["rows"], found["flipped"]) == (16, [])
    assert found["max_difference"] <= 1e-5
    probe = tmp_path / "probe"
    probe.mkdir()
    (probe / "run.py").write_text("import json, platform\nprint(json.dumps(platform.uname()))\n")
    (probe / "requirements.txt").write_text("")
    assert "aarch64" in emulated_lines(probe, tmp_path, system)[0]
