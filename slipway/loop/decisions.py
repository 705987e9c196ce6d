"""Decision requests, decisions, and the check that a decision belongs to the pending request.

A request is the file SLIPWAY_STATE/loop/CYCLE/request.json. A decision contains the SHA-256 of that
file, so it is valid only for this candidate, this data and this served model. Each request also has
a random id, so a decision about an equal candidate of another cycle or service is not valid for it.
With `loop.approvers` a decision needs an ECDSA signature by one of these keys (NIST curves,
SHA-256).
"""

import base64
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from slipway.artifacts.signature import end_of_key
from slipway.loop.comparison import CandidateComparison
from slipway.loop.journal import Cycle, LoopError
from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import UnavailableError

REQUEST = "request.json"
CLOCK_S = 60.0  # largest accepted difference between the clocks of two machines
_ASK = "Ask for the pending request with `slipway loop --status`."


class DecisionRequest(Contract):
    """Asks if a candidate may replace the served model; written to `request.json`."""

    format_version: Literal[1]
    id: str  # random id of the request
    cycle: int
    created: float  # seconds since 1970
    expires: float
    reasons: list[str]  # triggers that began the cycle
    version: str  # version of the candidate
    bundle_digest: str  # SHA-256 of bundle.json, in hex
    certificate_digest: str  # SHA-256 of certificate.json, in hex
    data_digest: str  # DVC's digest of the raw data
    gates: str
    experiment: str
    replaces: str  # version of the served model
    comparison: CandidateComparison
    why: str  # the comparison in words


class PersonDecision(Contract):
    """A person's decision about one request."""

    format_version: Literal[1]
    request: str  # SHA-256 of request.json, in hex
    version: str
    verdict: Literal["approved", "rejected"]
    by: str = Field(min_length=1, max_length=100)
    reason: str = Field(min_length=1, max_length=500)
    time: float  # seconds since 1970
    signature: str | None = None  # base64, of the other fields as canonical JSON

    @property
    def payload(self) -> bytes:
        """The bytes that a signature covers: canonical JSON of all other fields."""
        return files.canonical_json(self.model_dump(mode="json", exclude={"signature"})).encode()


def new_request(**fields: Any) -> DecisionRequest:
    """Create a request with a random id."""
    return DecisionRequest(format_version=1, id=secrets.token_hex(16), **fields)


def read_request(path: Path) -> DecisionRequest:
    """Read a decision request; LoopError if the file is missing or damaged."""
    fix = "Restore it from a backup, or reject the candidate."
    try:
        return parse_record(DecisionRequest, path, path.read_bytes(), LoopError, fix)
    except FileNotFoundError:
        raise LoopError(f"{path} is missing, expected the request for a decision. {_ASK}") from None


def read_decision(path: Path) -> PersonDecision:
    """Read a decision from a file, such as one made on another machine."""
    fix = "Make it again: slipway loop approve VERSION --request FILE --out FILE"
    return parse_record(PersonDecision, path, path.read_bytes(), LoopError, fix)


def check_decision(
    decision: PersonDecision,
    cycle: Cycle | None,
    folder: Path,
    now: float,
    approvers: Sequence[str],
    key_list: Path | None = None,
) -> DecisionRequest:
    """Return the pending request if the decision is valid for it; else raise LoopError.

    Args:
        cycle: the last cycle, open or ended.
        folder: the folder that holds the folders of all cycles.
        now: seconds since 1970.
        approvers: files of public keys, one of which must have signed; [] accepts no signature.
        key_list: the list of keys that expire or were revoked, of SLIPWAY_SIGNER_LIST.
    """
    if cycle is None or not cycle.is_open or not cycle.has("requested"):
        raise LoopError(
            f"no decision is awaited, but there is one on {decision.version}: it was used before, "
            f"or its cycle has ended. {_ASK}"
        )
    if cycle.has("decided"):
        decided = cycle.detail("decided")
        raise LoopError(
            f"{decided['version']} was {decided['verdict']} by {decided['by']} already, expected "
            "no further decision on it. To undo it: slipway rollout abort, or rollback"
        )
    requested = cycle.detail("requested")
    path = folder / requested["path"]
    request = read_request(path)
    if files.sha256_file(path) != requested["digest"]:
        raise LoopError(
            f"{path} was changed after it was written, expected SHA-256 {requested['digest']}. "
            "Reject the candidate, and look for who changed it."
        )
    if decision.version != request.version:
        raise LoopError(
            f"the decision is on {decision.version}, expected {request.version}, which is "
            f"requested. {_ASK}"
        )
    if decision.request != requested["digest"]:
        raise LoopError(
            f"the decision is for another request ({decision.request[:12]}) on {request.version}, "
            f"expected {requested['digest'][:12]}: it is of another cycle or service. Decide again "
            "on the pending request."
        )
    if now >= request.expires or decision.time >= request.expires:
        raise LoopError(
            f"the request on {request.version} expired at {moment(request.expires)}, expected a "
            "decision before. The next cycle makes a new request."
        )
    if decision.time < request.created - CLOCK_S or decision.time > now + CLOCK_S:
        raise LoopError(
            f"the decision has the time {moment(decision.time)}, expected one between the request "
            f"({moment(request.created)}) and now ({moment(now)}). Set the clocks of both "
            "machines, and decide again."
        )
    if approvers:
        _check_signature(decision, approvers, key_list, now)
    return request


def signed(decision: PersonDecision, key: Path) -> PersonDecision:
    """Return the decision with a signature by the private key in the PEM file `key`.

    Raises LoopError if the file holds no usable key on a NIST curve.
    """
    crypto = _cryptography()
    try:
        private = crypto.serialization.load_pem_private_key(key.read_bytes(), None)
        payload = private.sign(decision.payload, crypto.ec.ECDSA(crypto.hashes.SHA256()))
    except Exception as error:  # many types; other kinds of key take other arguments
        raise LoopError(
            f"{key} cannot sign ({str(error)[:200]}), expected a private key on a NIST curve in "
            "PEM, without a password. Make one: openssl ecparam -name prime256v1 -genkey -noout"
        ) from error
    return decision.model_copy(update={"signature": base64.b64encode(payload).decode()})


def moment(seconds: float) -> str:
    """Format a time for people, to the second, in UTC."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _check_signature(
    decision: PersonDecision, approvers: Sequence[str], key_list: Path | None, now: float
) -> None:
    if decision.signature is None:
        raise LoopError(
            f"the decision of {decision.by} is not signed, expected the signature of one of "
            f"{', '.join(approvers)} (loop.approvers). Add --sign KEY."
        )
    crypto = _cryptography()
    for approver in approvers:
        try:
            public = crypto.serialization.load_pem_public_key(Path(approver).read_bytes())
            public.verify(
                base64.b64decode(decision.signature),
                decision.payload,
                crypto.ec.ECDSA(crypto.hashes.SHA256()),
            )
        except crypto.InvalidSignature:
            continue
        except Exception as error:  # cryptography raises many types for an unusable file
            raise LoopError(
                f"loop.approvers names {approver}, which cannot be used ({str(error)[:200]}); "
                "expected a public key on a NIST curve in PEM. Correct the file."
            ) from error
        if end := end_of_key(Path(approver), key_list, datetime.fromtimestamp(now, UTC)):
            raise LoopError(
                f"the decision of {decision.by} is signed with the key {approver}, which according "
                f"to {key_list} {end}. Expected a valid key. Sign the decision with another key of "
                "loop.approvers."
            )
        return
    raise LoopError(
        f"the signature of {decision.by} is by no key of loop.approvers, or the decision was "
        f"changed after it was signed; expected one of {', '.join(approvers)}. Sign it with such a "
        "key."
    )


def _cryptography() -> Any:
    try:
        from types import SimpleNamespace

        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise UnavailableError(
            f"signed decisions need the package cryptography ({error}). Install it: "
            "pip install 'slipway-ml[sign]'"
        ) from error
    return SimpleNamespace(
        hashes=hashes, serialization=serialization, ec=ec, InvalidSignature=InvalidSignature
    )
