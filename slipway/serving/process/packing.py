"""Checks a project before `bentoml build`, so that a bento contains only a servable model.

A bento contains the files of the project's own folder, regardless of SLIPWAY_ variables. So these
files are checked.

The bento of a clone contains Slipway's code. A project has no copy of it, so its bento contains
Slipway's wheel, from the project's folder `build/`. It is rebuilt from the installed package: an
installation does not keep its wheel, but its RECORD (PyPA's "Recording installed projects") lists
each file with its SHA-256. So the same installation gives the same bytes, and an altered one fails.
"""

import base64
import csv
import io
import shutil
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

from slipway.artifacts.engine_manifest import (
    ENGINE_MANIFEST,
    check_origin,
    read_engine_manifest,
    read_plan,
)
from slipway.predictor.loader import read_certified
from slipway.serving.settings import ROOT, Settings
from slipway.system import files
from slipway.system.assets import asset
from slipway.system.errors import CertificateError, IntegrityError, UnavailableError
from slipway.system.version import installed_version, other_version

NAME = "slipway-ml"
PATTERN = "slipway_ml-*.whl"
_PACKAGE = Path(__file__).parents[2]
# The installer writes the other files of a `.dist-info`.
_METADATA = ("METADATA", "WHEEL", "entry_points.txt", "licenses")
_BUILD = Path("build")
_IMAGE = (
    "container.j2",
    "requirements.cpu.lock",
    "requirements.gpu.lock",
    "requirements.grpc.lock",
    "requirements.tracing.lock",
    "requirements.postgres.lock",
)
CODE = Path(__file__).parents[3]  # the folder that holds `slipway`


def bento_labels(root: Path = ROOT) -> dict[str, str]:
    """Return the labels of the project's bento.

    Raises SlipwayError if the bento may not be built.
    """
    bundle_root, certificate_path, engine = (
        root / Settings.model_fields[name].default for name in ("bundle", "certificate", "engine")
    )
    bundle, certificate = read_certified(bundle_root, certificate_path, accept_draft=False)
    bundle.manifest.input.require_usable()
    if (engine / ENGINE_MANIFEST).exists():
        engine_manifest = read_engine_manifest(engine, certificate.engine_digest)
        check_origin(engine_manifest, bundle)
        read_plan(engine, engine_manifest)
    if other := other_version(certificate.versions):
        raise CertificateError(
            f"Slipway {other} made the certificate, and the bento would hold Slipway "
            f"{installed_version()}; expected the same version. Certify the model again with "
            f"`slipway run`, or install Slipway {other}."
        )
    agreeing = [hop.name for hop in certificate.hops if hop.status == "agrees"]
    return {
        "model_version": bundle.version,
        "task": bundle.manifest.task,
        "slipway": installed_version(),
        "hops_that_agree": str(len(agreeing)),
    }


def write_build_files(root: Path = ROOT) -> None:
    """Write the files that bentofile.yaml copies from `build/`: Slipway's wheel, locks, the image.

    A clone does not need them. Raises the errors of `write_own_wheel`.
    """
    if root.resolve() == CODE.resolve():
        return
    write_own_wheel(root / _BUILD)
    for name in _IMAGE:
        shutil.copyfile(asset(f"launch/{name}"), root / _BUILD / name)


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
        f"{NAME} in this environment, because the wheel for other machines is made of its files. "
        f"Install it (`pip install '{NAME}[serve]'`, not in editable mode), or do this in a clone "
        "of Slipway."
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
