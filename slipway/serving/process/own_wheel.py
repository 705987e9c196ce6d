"""Rebuilds Slipway's wheel from the installed package, for the bento of a project.

An installation does not keep its wheel. Its RECORD (PyPA's "Recording installed projects") lists
each file with its SHA-256, so the same installation gives the same bytes, and an altered one fails.
"""

import base64
import csv
import io
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

from slipway.system import files
from slipway.system.errors import IntegrityError, UnavailableError

NAME = "slipway-ml"
PATTERN = "slipway_ml-*.whl"
_PACKAGE = Path(__file__).parents[2]
# The installer writes the other files of a `.dist-info`.
_METADATA = ("METADATA", "WHEEL", "entry_points.txt", "licenses")


def write_own_wheel(folder: Path, package: Path = _PACKAGE) -> Path:
    """Write the wheel of the installed `package` into `folder`; return its path.

    Replaces wheels of other versions there. Raises UnavailableError if the package was not
    installed from a wheel, IntegrityError if a file of the installation was changed.
    """
    installed = _installed(package)
    recorded = _recorded_files(installed)
    (info,) = {name.partition("/")[0] for name in recorded if name.endswith(".dist-info/WHEEL")}
    path = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    payload = _archive(installed, recorded, f"{info}/RECORD")
    for old in folder.glob(PATTERN):
        if old != path:
            old.unlink()
    files.write_bytes(path, payload)
    return path


def _installed(package: Path) -> Distribution:
    """Return the distribution that installed the package. Raises UnavailableError without one."""
    for found in distributions(name=NAME, path=[str(package.parent)]):
        if any(name == "slipway/__init__.py" for name, *_ in _record(found)):
            return found
    raise UnavailableError(
        f"Slipway runs from {package}, which was not installed from a wheel. Expected the package "
        f"{NAME} in this environment, because the bento of a project contains it. Install it "
        f"(`pip install '{NAME}[serve]'`, not in editable mode), or build in a clone of Slipway."
    )


def _record(installed: Distribution) -> list[list[str]]:
    """Read the file RECORD: name, digest and size of each installed file.

    `Distribution.files` is not used, because in Python 3.12 it omits missing files.
    """
    return list(csv.reader((installed.read_text("RECORD") or "").splitlines()))


def _recorded_files(installed: Distribution) -> dict[str, tuple[str, str]]:
    """Return (digest, size) of each file of the wheel by its name, sorted, metadata last."""
    found = {}
    for name, digest, size in _record(installed):
        top, _, rest = name.partition("/")
        is_metadata = top.endswith(".dist-info") and rest.partition("/")[0] in _METADATA
        if digest and (top == "slipway" or is_metadata) and not name.endswith(".pyc"):
            found[name] = (digest.removeprefix("sha256="), size)
    return dict(sorted(found.items(), key=lambda entry: (".dist-info/" in entry[0], entry[0])))


def _archive(installed: Distribution, recorded: dict[str, tuple[str, str]], record: str) -> bytes:
    """Return the wheel's bytes; fixed order, times and modes make them reproducible."""
    memory, text = io.BytesIO(), io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (digest, size) in recorded.items():
            path = Path(str(installed.locate_file(name)))
            archive.writestr(_entry(name, path), _verified(path, digest))
            rows.writerow((name, f"sha256={digest}", size))
        rows.writerow((record, "", ""))
        archive.writestr(_entry(record), text.getvalue())
    return memory.getvalue()


def _entry(name: str, path: Path | None = None) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)  # dated 1980
    is_executable = path is not None and path.is_file() and path.stat().st_mode & 0o100
    entry.external_attr = (0o100755 if is_executable else 0o100644) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def _verified(path: Path, digest: str) -> bytes:
    """Read an installed file. Raises IntegrityError if its digest is not the recorded one."""
    expected = base64.urlsafe_b64decode(f"{digest}=").hex()
    try:
        payload = path.read_bytes()
    except OSError:
        payload = None
    if payload is None or files.sha256_bytes(payload) != expected:
        state = "is missing" if payload is None else "was changed"
        raise IntegrityError(
            f"{path} {state} since Slipway was installed. Expected the installed file, because a "
            f"bento contains it. Install it again: `pip install --force-reinstall {NAME}`."
        )
    return payload
