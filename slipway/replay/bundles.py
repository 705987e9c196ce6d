"""The bundle that answered a request, and the certificate beside it: by digest, wherever below `artifacts/` they are."""

import os
from pathlib import Path

from slipway.artifacts.bundle import MANIFEST, LoadedBundle, load_bundle
from slipway.artifacts.certificate import Certificate, check_certificate, read_certificate
from slipway.system import files
from slipway.system.errors import BundleError, CertificateError, UnavailableError

ARTIFACTS = Path("artifacts")
CERTIFICATE = "certificate.json"


def find_bundle(digest: str, given: Path, artifacts: Path = ARTIFACTS) -> LoadedBundle:
    """The bundle of that digest, or of the model version that is its beginning: `given`, or one below `artifacts`.

    UnavailableError that names the version where it is neither; BundleError where a file of it was altered.
    """
    for root in (given, *_bundles_below(artifacts)):
        found = _digest(root)
        if found is not None and found.startswith(digest):
            bundle = load_bundle(root)
            bundle.verify()
            return bundle
    there = _digest(given)
    beside = f"{given} is model {there[:12]}" if there else f"{given} is no bundle"
    raise UnavailableError(
        f"model {digest[:12]} is needed, but {beside}, and no bundle below {artifacts}/ is {digest[:12]}. "
        f"Get that bundle back (dvc checkout at its revision, or a copy), and give its folder with --bundle."
    )


def find_certificate(bundle: LoadedBundle) -> tuple[Certificate | None, str]:
    """The certificate beside a bundle, if it is of this very bundle and certifies it, and what to say of it.

    `make release` puts it into the bundle's own folder.
    """
    inside = bundle.root / CERTIFICATE
    path = inside if inside.is_file() else bundle.root.parent / CERTIFICATE
    try:
        certificate = read_certificate(path)
        check_certificate(certificate, bundle, accept_draft=False, accept_missed_gates=True)
    except CertificateError as error:
        return None, f"none that certifies it: {error}"
    return certificate, f"{certificate.status}, gates {certificate.gates}, {path}"


def kept_directory() -> Path | None:
    """What SLIPWAY_KEEP_DIRECTORY says, as for the service."""
    named = os.environ.get("SLIPWAY_KEEP_DIRECTORY")
    return Path(named) if named else None


def given_bundle() -> Path:
    """What SLIPWAY_BUNDLE says, else the pipeline's own."""
    return Path(os.environ.get("SLIPWAY_BUNDLE") or ARTIFACTS / "bundle")


def _bundles_below(folder: Path) -> list[Path]:
    return [path.parent for path in sorted(folder.rglob(MANIFEST))]


def _digest(root: Path) -> str | None:
    try:
        return files.sha256_file(root / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BundleError(
            f"{root / MANIFEST} cannot be read: {error.strerror}. Give this user the right to it."
        ) from error
