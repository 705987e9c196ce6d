"""`make release`: the certified bundle becomes the released one, which later trainings are compared with (`evaluate.reference_model`).

artifacts/reference_model/bundle.json, model_*.onnx   the bundle as it was certified, with its model card and golden rows
artifacts/reference_model/certificate.json            its certificate
artifacts/reference_model/known_rows.parquet          ids of the rows that it learned from or was chosen by, where they can be told
artifacts/reference_model/release.json                digests of bundle, certificate and rows, written last

The folder is there as a whole or not at all; a later release takes its place. A bundle that is not certified, or did not
pass its quality gates, is refused.
"""

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import ValidationError

from slipway.artifacts.bundle import MANIFEST, LoadedBundle, load_bundle
from slipway.artifacts.certificate import check_certificate, read_certificate
from slipway.config.command import run_stage
from slipway.data.engine.rows import read_table, write_table
from slipway.data.store.packed import open_split, read_manifest
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import BundleError, IntegrityError

BUNDLE = Path("artifacts/bundle")
CERTIFICATE = Path("artifacts/certificate.json")
PACKED = Path("data/packed")
RELEASED = Path("artifacts/reference_model")
RECORD = "release.json"
ROWS = "known_rows.parquet"
_LEARNT_FROM = ("train", "val")  # val chose the epoch
_SCHEMA = pa.schema([pa.field("id", pa.string(), nullable=False)])


class Release(Contract):
    """The content of `release.json`."""

    format_version: Literal[1]
    bundle_digest: str  # hex SHA-256 of bundle.json
    certificate_digest: str  # hex SHA-256 of certificate.json
    rows_digest: str | None  # hex SHA-256 of known_rows.parquet; null where there is none


def release() -> str:
    """Copy bundle and certificate to `artifacts/reference_model/`; what was done, in a line.

    CertificateError unless the certificate is of this bundle and certifies it, GateMissedError unless its gates were
    passed, BundleError if a file of it was altered.
    """
    bundle = load_bundle(BUNDLE)
    bundle.verify()
    check_certificate(read_certificate(CERTIFICATE), bundle, accept_draft=False)
    learnt_from = _learnt_from(bundle)
    with files.new_directory(RELEASED) as folder:
        for name in bundle.file_names:
            shutil.copyfile(BUNDLE / name, folder / name)
        shutil.copyfile(CERTIFICATE, folder / CERTIFICATE.name)
        if learnt_from is not None:
            write_table(folder / ROWS, pa.table({"id": learnt_from}, schema=_SCHEMA), _SCHEMA)
        load_bundle(folder).verify()
        files.write_json(folder / RECORD, _record(folder).model_dump())
    rows = (
        f"without its rows: {PACKED} holds others"
        if learnt_from is None
        else f"with the ids of the {len(learnt_from)} rows it knows"
    )
    return f"released {bundle.version} to {RELEASED}, {rows}. Compare with it: evaluate.reference_model: {RELEASED}"


def read_known_rows(
    bundle: LoadedBundle, ids: list[str], packed: Path
) -> tuple[NDArray[np.bool_] | None, str]:
    """Which of the test rows `ids` a released bundle has learned from or was chosen by, or None; and what can be said of it.

    IntegrityError where what `make release` wrote was altered since.
    """
    release = _read_release(bundle)
    if release is not None and release.rows_digest is not None:
        known = set(_read_rows(bundle.root / ROWS, release.rows_digest))
        mask = np.array([row_id in known for row_id in ids])
        return mask, f"it knows {int(mask.sum())} of {len(ids)} test rows by {ROWS}"
    if _is_made_from(bundle, packed):
        return np.zeros(
            len(ids), bool
        ), "it was made from these very packed rows, so that the test rows are new to it"
    return (
        None,
        f"which rows it learned from is not known: {bundle.root} has no {ROWS}, and it was made from other packed rows",
    )


def _learnt_from(bundle: LoadedBundle) -> list[str] | None:
    """None where the packed store is not the one that the bundle was made from, or is not here."""
    if not _is_made_from(bundle, PACKED):
        return None
    manifest = read_manifest(PACKED)
    return [row_id for split in _LEARNT_FROM for row_id in open_split(PACKED, manifest, split).ids]


def _is_made_from(bundle: LoadedBundle, packed: Path) -> bool:
    """By the digest of the packed manifest, which has the digests of all rows."""
    path = packed / "manifest.json"
    return path.is_file() and bundle.manifest.lineage.digests.get(
        PACKED.joinpath(path.name).as_posix()
    ) == files.sha256_file(path)


def _record(folder: Path) -> Release:
    digests = {
        name: files.sha256_file(folder / name)
        for name in (MANIFEST, CERTIFICATE.name, ROWS)
        if (folder / name).exists()
    }
    return Release(
        format_version=1,
        bundle_digest=digests[MANIFEST],
        certificate_digest=digests[CERTIFICATE.name],
        rows_digest=digests.get(ROWS),
    )


def _read_release(bundle: LoadedBundle) -> Release | None:
    """None for a bundle that was not put there by `make release`."""
    path = bundle.root / RECORD
    if not path.exists():
        return None
    try:
        release = Release.model_validate(json.loads(path.read_bytes()))
    except (ValueError, ValidationError) as error:
        raise BundleError(
            f"{path} is not what `make release` writes: {error}. Release again."
        ) from error
    if release.bundle_digest != bundle.digest:
        raise IntegrityError(
            f"{path} is for bundle {release.bundle_digest[:12]}, {bundle.root} holds {bundle.version}. Release again."
        )
    return release


def _read_rows(path: Path, sha256: str) -> list[str]:
    if not path.is_file() or files.sha256_file(path) != sha256:
        raise IntegrityError(
            f"{path} is missing or was altered since the release. Release again, or copy the whole folder again."
        )
    ids: list[str] = read_table(path, _SCHEMA)["id"].to_pylist()
    return ids


if __name__ == "__main__":
    run_stage(lambda _: print(release()))
