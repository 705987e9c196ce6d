"""Signs a released model and checks a signature, in the format of OpenSSF Model Signing.

https://github.com/sigstore/model-transparency describes it. `model.sig` covers the names and the
SHA-256 of all other files in the folder, so it names each file that was changed, added or removed.
Keys are elliptic (NIST P-256, P-384 or P-521) in PEM; nothing is looked up in a network.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slipway.system.errors import IntegrityError, SlipwayError, UnavailableError

SIGNATURE = "model.sig"
_MAKE = (
    "Make a pair: openssl ecparam -name prime256v1 -genkey -noout -out signing.pem; "
    "openssl ec -in signing.pem -pubout -out signing.pub"
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


def require_signer(folder: Path, certificate: Path, keys: Sequence[Path]) -> None:
    """Check that one of the public keys signed the bundle in `folder` with its certificate.

    Raises IntegrityError if none of them did, or if the certificate is not a part of the folder.
    """
    signed = folder / "certificate.json"
    if not signed.is_file() or signed.read_bytes() != certificate.read_bytes():
        raise IntegrityError(
            f"no signature covers the certificate {certificate}: {folder} has no equal one. "
            "Expected the folder of a signed release. Write it with `slipway release --sign KEY`, "
            "and let SLIPWAY_BUNDLE and SLIPWAY_CERTIFICATE name it and the certificate.json in it."
        )
    refusals = []
    for key in keys:
        try:
            verify(folder, key)
        except IntegrityError as refusal:
            refusals.append(refusal)
        else:
            return
    raise refusals[0]


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
