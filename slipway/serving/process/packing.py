"""Checks a project before `bentoml build`, so that a bento contains only a servable model.

A bento contains the files of the project's own folder, regardless of SLIPWAY_ variables. So these
files are checked.

The bento of a clone contains Slipway's code. A project has no copy of it, so its bento contains
Slipway's wheel, from the project's folder `build/`.
"""

import shutil
from pathlib import Path

from slipway.artifacts.engine_manifest import (
    ENGINE_MANIFEST,
    check_origin,
    read_engine_manifest,
    read_plan,
)
from slipway.predictor.loader import read_certified
from slipway.serving.process.own_wheel import write_own_wheel
from slipway.serving.settings import ROOT, Settings
from slipway.system.assets import asset
from slipway.system.errors import CertificateError
from slipway.system.version import installed_version, other_version

_BUILD = Path("build")
_IMAGE = (
    "container.j2",
    "requirements.cpu.lock",
    "requirements.gpu.lock",
    "requirements.grpc.lock",
    "requirements.tracing.lock",
    "requirements.postgres.lock",
)
_CODE = Path(__file__).parents[3]  # the folder that holds `slipway`


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
    if root.resolve() == _CODE.resolve():
        return
    write_own_wheel(root / _BUILD)
    for name in _IMAGE:
        shutil.copyfile(asset(f"launch/{name}"), root / _BUILD / name)
