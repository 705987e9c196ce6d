"""Finds the bundle that answered a request, by digest below `artifacts/`, and its certificate."""

import os
from pathlib import Path

from slipway.artifacts.bundle import MANIFEST, LoadedBundle, load_bundle
from slipway.artifacts.certificate import Certificate, check_certificate, read_certificate
from slipway.system import files
from slipway.system.errors import BundleError, CertificateError, UnavailableError

ARTIFACTS = Path("artifacts")
CERTIFICATE = "certificate.json"


def find_bundle(digest: str, given: Path, artifacts: Path = ARTIFACTS) -> LoadedBundle:
    """Find a bundle by digest or model version: `given`, or one below `artifacts`.

    UnavailableError if there is none; BundleError if one of its files was altered.
    """
    for root in (given, *(path.parent for path in sorted(artifacts.rglob(MANIFEST)))):
        found = _digest(root)
        if found is not None and found.startswith(digest):
            bundle = load_bundle(root)
            bundle.verify()
            return bundle
    there = _digest(given)
    other = f"{given} is model {there[:12]}" if there else f"{given} is not a bundle"
    raise UnavailableError(
        f"model {digest[:12]} is needed, but {other}, and no bundle below {artifacts}/ is "
        f"{digest[:12]}. Restore that bundle (dvc checkout at its revision, or a copy) and set "
        "--bundle to its folder."
    )


def find_certificate(bundle: LoadedBundle) -> tuple[Certificate | None, str]:
    """Read the certificate beside or inside a bundle if it certifies this bundle; describe it.

    `slipway release` copies the certificate into the bundle's folder.
    """
    inside = bundle.root / CERTIFICATE
    path = inside if inside.is_file() else bundle.root.parent / CERTIFICATE
    try:
        certificate = read_certificate(path)
        check_certificate(certificate, bundle, accept_draft=False, accept_missed_gates=True)
    except CertificateError as error:
        return None, f"none that certifies it: {error}"
    return certificate, f"{certificate.status}, gates {certificate.gates}, {path}"


def request_log_directory() -> Path | None:
    """Return the folder in SLIPWAY_REQUEST_LOG_DIRECTORY; None if it is unset or empty."""
    named = os.environ.get("SLIPWAY_REQUEST_LOG_DIRECTORY")
    return Path(named) if named else None


def given_bundle() -> Path:
    """Return SLIPWAY_BUNDLE, or else the pipeline's bundle."""
    return Path(os.environ.get("SLIPWAY_BUNDLE") or ARTIFACTS / "bundle")


def _digest(root: Path) -> str | None:
    try:
        return files.sha256_file(root / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BundleError(
            f"{root / MANIFEST} cannot be read: {error.strerror}. Make it readable for this user."
        ) from error
