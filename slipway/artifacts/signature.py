"""Signs a released model and checks a signature, in the format of OpenSSF Model Signing.

https://github.com/sigstore/model-transparency describes it. `model.sig` covers the names and the
SHA-256 of all other files in the folder, so it names each file that was changed, added or removed.
Keys are elliptic (NIST P-256, P-384 or P-521) in PEM; nothing is looked up in a network. A list of
keys (JSON) may give keys an expiry, or revoke them.
"""

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field

from slipway.system.contract import Contract, parse_record
from slipway.system.errors import IntegrityError, SlipwayError, UnavailableError
from slipway.system.version import git

SIGNATURE = "model.sig"
_LIST = (
    'Expected {"format_version": 1, "keys": [{"sha256": "...", "expires": "2027-01-01T00:00:00Z", '
    '"revoked": "the reason"}]}, where expires and revoked may be left out, and sha256 is what '
    "`sha256sum signing.pub` prints. Correct the list."
)
_MAKE = (
    "Make a pair: openssl ecparam -name prime256v1 -genkey -noout -out ../signing.pem; "
    "openssl ec -in ../signing.pem -pubout -out signing.pub"
)
_PRIVATE = "^-----BEGIN ([A-Z]+ )*PRIVATE KEY-----"
_KEY_FILES = ("*.pem", "*.key", "*.p8")


class ListedKey(Contract):
    """A public key that expires or was revoked."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # of its PEM, as OpenSSL writes it
    expires: AwareDatetime | None = None
    revoked: Annotated[str, Field(min_length=1)] | None = None  # the reason


class KeyList(Contract):
    """The content of the list of keys. A key that is not in the list has no expiry."""

    format_version: Literal[1]
    keys: list[ListedKey]


def require_untracked_keys(folder: Path) -> None:
    """Raise SlipwayError if git tracks a private key in a folder: who has the repository can sign.

    Without git there is nothing to check.
    """
    found = git(folder, "grep", "--cached", "--name-only", "-E", "-e", _PRIVATE, "--", *_KEY_FILES)
    if found:
        names = ", ".join(map(repr, found.splitlines()))
        raise SlipwayError(
            f"git tracks the private key {names}, expected it outside of the repository: whoever "
            "has a copy can sign models. Make a new pair and revoke this one, because the history "
            f"keeps it; `git rm --cached {shlex.join(found.splitlines())}` ends the tracking."
        )


def sign(folder: Path, key: Path) -> None:
    """Write `model.sig` into the folder, signed with the private key in `key`.

    Raises SlipwayError if it is not an elliptic private key without a password.
    """
    signing = _import("signing")
    make = signing.Config().set_hashing_config(_all_but_the_signature(folder))
    _with_key(lambda: make.use_elliptic_key_signer(private_key=key), "a private key", key)
    make.sign(folder.resolve(), folder / SIGNATURE)


def verify(folder: Path, key: Path) -> None:
    """Check `model.sig` of the folder with the public key in `key`.

    Raises IntegrityError if it is missing, was made with another key, or does not fit the files.
    """
    path = folder / SIGNATURE
    if not path.is_file():
        raise IntegrityError(
            f"{folder} is not signed: it has no {SIGNATURE}, expected one for the key {key}. "
            "Copy the whole folder again, or sign it: slipway release --sign KEY"
        )
    check = _import("verifying").Config().set_hashing_config(_all_but_the_signature(folder))
    _with_key(lambda: check.use_elliptic_key_verifier(public_key=key), "a public key", key)
    try:
        check.verify(folder.resolve(), path)
    except Exception as error:  # of many kinds, for a signature that was changed
        raise IntegrityError(
            f"the signature {path} does not hold for {key}: {str(error)[:500]} Do not use the "
            "model; copy it again from where it was signed."
        ) from error


def verify_by_any(
    folder: Path, keys: Sequence[Path], key_list: Path | None = None, now: datetime | None = None
) -> str:
    """Check `model.sig` with each of the public keys; return the one that signed, in words.

    `key_list` is read at each call; `now` is the clock of this machine unless given.

    Raises:
        IntegrityError: none of them signed the folder, or the one that did expired or was revoked.
        SlipwayError: a key or the list cannot be used.
    """
    listed = _read_list(key_list) if key_list else []
    refusals = []
    for key in keys:
        try:
            verify(folder, key)
        except IntegrityError as refusal:
            refusals.append(refusal)
            continue
        sha256 = _sha256_of(key)
        ends = [
            _require_valid(entry, key, folder, key_list, now or datetime.now(UTC))
            for entry in listed
            if entry.sha256 == sha256
        ]
        until = "".join(f", valid until {end.isoformat()}" for end in ends if end)
        return f"signed with the key of {key} (SHA-256 {sha256[:12]}{until})"
    raise refusals[0]


def signing_key(folder: Path) -> str | None:
    """Return the SHA-256 of the public key that `model.sig` names, without checking the signature.

    None if there is no such name.
    """
    try:
        content = json.loads((folder / SIGNATURE).read_bytes())
        return str(content["verificationMaterial"]["publicKey"]["hint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def require_signer(
    folder: Path, certificate: Path, keys: Sequence[Path], key_list: Path | None = None
) -> None:
    """Check that one of the public keys signed the bundle in `folder` with its certificate.

    Raises IntegrityError if none of them did, if the key expired or was revoked according to the
    list, or if the certificate is not a part of the folder.
    """
    if not keys:
        raise SlipwayError(
            f"SLIPWAY_SIGNER_LIST is {key_list}, but SLIPWAY_SIGNERS names no key; expected the "
            "public keys that may sign. Set SLIPWAY_SIGNERS, or leave out the list."
        )
    signed = folder / "certificate.json"
    if not signed.is_file() or signed.read_bytes() != certificate.read_bytes():
        raise IntegrityError(
            f"no signature covers the certificate {certificate}: {folder} has no equal one. "
            "Expected the folder of a signed release. Write it with `slipway release --sign KEY`, "
            "and let SLIPWAY_BUNDLE and SLIPWAY_CERTIFICATE name it and the certificate.json in it."
        )
    verify_by_any(folder, keys, key_list)


def _read_list(path: Path) -> list[ListedKey]:
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise SlipwayError(f"the list of keys {path} cannot be read ({error}). {_LIST}") from error
    return parse_record(KeyList, path, payload, SlipwayError, _LIST).keys


def _require_valid(
    entry: ListedKey, key: Path, folder: Path, key_list: Path | None, now: datetime
) -> datetime | None:
    """Return the expiry of a listed key, if any.

    Raises IntegrityError if it expired or was revoked.
    """
    if reason := _end_of(entry, now):
        raise IntegrityError(
            f"{folder} is signed with the key {key}, which according to {key_list} {reason}. "
            "Expected a signature by a valid key. Sign the release with another key: `slipway "
            "release --sign KEY`."
        )
    return entry.expires


def end_of_key(key: Path, key_list: Path | None, now: datetime) -> str:
    """Return why a public key is not valid, such as "was revoked: stolen"; "" if it is valid.

    Raises SlipwayError if the list cannot be read.
    """
    listed = _read_list(key_list) if key_list else []
    ends = (_end_of(entry, now) for entry in listed if entry.sha256 == _sha256_of(key))
    return next(filter(None, ends), "")


def _end_of(entry: ListedKey, now: datetime) -> str:
    if entry.revoked:
        return f"was revoked: {entry.revoked}"
    if entry.expires and entry.expires <= now:
        return f"expired at {entry.expires.isoformat()}; it is {now.isoformat('T', 'seconds')}"
    return ""


def _sha256_of(key: Path) -> str:
    """Return the SHA-256 of a public key in OpenSSL's PEM form, as `model.sig` records it."""
    from cryptography.hazmat.primitives import serialization

    public = serialization.load_pem_public_key(key.read_bytes())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(serialization.Encoding.PEM, form)).hexdigest()


def _with_key(use: Callable[[], object], expected: str, key: Path) -> None:
    try:
        use()
    except Exception as error:  # of many kinds; another type of key is an AttributeError
        raise SlipwayError(
            f"{key} cannot be used ({str(error)[:200]}), expected {expected} on a NIST curve in "
            f"PEM, without a password. {_MAKE}"
        ) from error


def _all_but_the_signature(folder: Path) -> Any:
    config = _import("hashing").Config()
    ignored = [(folder / SIGNATURE).resolve()]
    return config.set_ignored_paths(paths=ignored, ignore_git_paths=False)


def _import(name: str) -> Any:
    try:
        import model_signing
    except ImportError as error:
        raise UnavailableError(
            f"signatures need model-signing ({error}). Install it: pip install 'slipway-ml[sign]'"
        ) from error
    return getattr(model_signing, name)
