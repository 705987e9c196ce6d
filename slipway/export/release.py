"""`slipway release`: makes the certified bundle the reference model of later trainings.

In `artifacts/reference_model/`:
bundle.json, model_*.onnx   the bundle, with its model card and golden rows
certificate.json            its certificate
known_rows.parquet          ids of its training and validation rows, if known
release.json                digests of bundle, certificate and rows
test_result.intoto.json     its gates and backends as an in-toto statement
bom.cdx.json                its bill of materials: model, data, packages and their licences
model.sig                   with `--sign`: a signature of all of these

The folder is written as a whole or not at all; a later release replaces it. A bundle that is not
certified or did not pass its quality gates is refused. `evaluate.reference_model` names the folder.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from slipway.artifacts.bundle import MANIFEST, LoadedBundle, load_bundle
from slipway.artifacts.certificate import check_certificate, read_certificate
from slipway.artifacts.locations import BUNDLE, CERTIFICATE, PACKED
from slipway.artifacts.signature import (
    SIGNATURE,
    require_untracked_keys,
    sign,
    signing_key,
    verify_by_any,
)
from slipway.data.engine.rows import content_of, read_table, write_table
from slipway.data.store.packed import open_split, read_manifest
from slipway.export.certification.bill_of_materials import BILL, bill_of_materials, undeclared
from slipway.export.certification.statement import STATEMENT, statement_of
from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import BundleError, IntegrityError, SlipwayError

RELEASED = Path("artifacts/reference_model")
RECORD = "release.json"
ROWS = "known_rows.parquet"
_KNOWN_SPLITS = ("train", "val")  # val chose the epoch
_SCHEMA = pa.schema([pa.field("id", pa.string(), nullable=False)])


class Release(Contract):
    """The content of `release.json`."""

    format_version: Literal[1]
    bundle_digest: str  # hex SHA-256 of bundle.json
    certificate_digest: str  # hex SHA-256 of certificate.json
    rows_digest: str | None  # hex SHA-256 of known_rows.parquet; null if there is none


def release(key: Path | None = None) -> str:
    """Copy bundle and certificate to `artifacts/reference_model/`; return a line for the terminal.

    Signs the folder with the private key in `key`, if given.

    Raises:
        CertificateError: the certificate is of another bundle, or does not certify it.
        GateMissedError: the bundle did not pass its quality gates.
        BundleError: a file of the bundle was altered.
        SlipwayError: the key cannot be used, or git tracks it or another one of the project.
    """
    for folder in {Path.cwd(), Path.cwd() if key is None else key.resolve().parent}:
        require_untracked_keys(folder)
    bundle = load_bundle(BUNDLE)
    bundle.verify()
    certificate = read_certificate(CERTIFICATE)
    check_certificate(certificate, bundle, accept_draft=False)
    known_ids = _known_ids(bundle)
    with files.new_directory(RELEASED) as folder:
        for name in bundle.file_names:
            shutil.copyfile(BUNDLE / name, folder / name)
        shutil.copyfile(CERTIFICATE, folder / CERTIFICATE.name)
        if known_ids is not None:
            write_table(folder / ROWS, pa.table({"id": known_ids}, schema=_SCHEMA), _SCHEMA)
        load_bundle(folder).verify()
        record = Release(
            format_version=1,
            bundle_digest=files.sha256_file(folder / MANIFEST),
            certificate_digest=files.sha256_file(folder / CERTIFICATE.name),
            rows_digest=None if known_ids is None else files.sha256_file(folder / ROWS),
        )
        files.write_json(folder / RECORD, record.model_dump())
        statement = statement_of(bundle, certificate, record.certificate_digest)
        files.write_json(folder / STATEMENT, statement)
        statement_digest = files.sha256_file(folder / STATEMENT)
        bill = bill_of_materials(bundle, certificate, record.certificate_digest, statement_digest)
        files.write_json(folder / BILL, bill)
        if key is not None:
            sign(folder, key)
    if known_ids is None:
        rows = f"without the ids of its training rows: {PACKED} was packed again"
    else:
        rows = f"with the ids of its {len(known_ids)} training and validation rows"
    missing = " and ".join(undeclared(bundle))
    remark = f". Its bill of materials lacks licences: set {missing}" if missing else ""
    return (
        f"released {bundle.version} to {RELEASED}, {rows}{', and signed' * (key is not None)}. "
        f"To compare with it, set evaluate.reference_model: {RELEASED}{remark}"
    )


def verify_bundle(folder: Path, keys: Sequence[Path] = (), key_list: Path | None = None) -> str:
    """Check a released folder, and its signature by one of the public keys; return a summary.

    Without a certificate in the folder, that beside it is read, as the service does. `key_list`
    names keys that expire or were revoked.

    Raises:
        IntegrityError: the signature is missing or does not hold, or its key is not valid.
        BundleError: a file of the bundle was altered.
        CertificateError: the certificate is of another bundle, or does not certify it.
        GateMissedError: the bundle did not pass its quality gates.
    """
    if key_list and not keys:
        raise SlipwayError(
            f"a list of keys is given ({key_list}), but no key; expected the public key that "
            "signed. Give it with --key."
        )
    signed = verify_by_any(folder, keys, key_list) if keys else "not signed"
    bundle = load_bundle(folder)
    bundle.verify()
    own = folder / CERTIFICATE.name
    certificate = read_certificate(own if own.exists() else folder.parent / CERTIFICATE.name)
    check_certificate(certificate, bundle, accept_draft=False)
    if not keys and (folder / SIGNATURE).exists():
        sha256 = (signing_key(folder) or "unknown")[:12]
        signed = f"its signature, by a key of SHA-256 {sha256}, was not checked: give --key"
    return (
        f"{bundle.version}: {len(bundle.file_names)} files as they were certified, gates "
        f"{certificate.gates}, {signed}"
    )


def read_known_rows(
    bundle: LoadedBundle, ids: list[str], packed: Path
) -> tuple[NDArray[np.bool_] | None, str]:
    """Find those of the test rows `ids` on which the reference model was trained or selected.

    It also knows a row if it was trained on another row with the same content.

    Returns:
        A mask, or None if its rows are unknown; and a remark in words.

    Raises:
        IntegrityError: files of the release were altered.
    """
    record = _read_record(bundle)
    if record is not None and record.rows_digest is not None:
        known = set(map(content_of, _read_ids(bundle.root / ROWS, record.rows_digest)))
        mask = np.array([content_of(row_id) in known for row_id in ids])
        return mask, f"it knows {int(mask.sum())} of {len(ids)} test rows, according to {ROWS}"
    if _is_made_from(bundle, packed):
        remark = "it was made from the same packed rows, so the test rows are new to it"
        return np.zeros(len(ids), bool), remark
    return None, (
        f"its training rows are unknown: {bundle.root} has no {ROWS}, "
        "and it was made from other packed rows"
    )


def _known_ids(bundle: LoadedBundle) -> list[str] | None:
    """Return the ids of the bundle's rows; None if the packed store is missing or changed."""
    if not _is_made_from(bundle, PACKED):
        return None
    manifest = read_manifest(PACKED)
    return [row_id for split in _KNOWN_SPLITS for row_id in open_split(PACKED, manifest, split).ids]


def _is_made_from(bundle: LoadedBundle, packed: Path) -> bool:
    """Return True if the digest of the packed manifest, which covers all rows, is the bundle's."""
    path = packed / "manifest.json"
    recorded = bundle.manifest.lineage.digests.get((PACKED / path.name).as_posix())
    return path.is_file() and recorded == files.sha256_file(path)


def _read_record(bundle: LoadedBundle) -> Release | None:
    """Read the record of `slipway release`; None for a bundle without one."""
    path = bundle.root / RECORD
    if not path.exists():
        return None
    record = parse_record(Release, path, path.read_bytes(), BundleError, "Release again.")
    if record.bundle_digest != bundle.digest:
        raise IntegrityError(
            f"{path} is for bundle {record.bundle_digest[:12]}, expected {bundle.version}, which "
            f"{bundle.root} holds. Run `slipway release` again."
        )
    return record


def _read_ids(path: Path, sha256: str) -> list[str]:
    if not path.is_file() or files.sha256_file(path) != sha256:
        raise IntegrityError(
            f"{path} is missing or was altered since the release. "
            "Release again, or copy the whole folder again."
        )
    ids: list[str] = read_table(path, _SCHEMA)["id"].to_pylist()
    return ids
