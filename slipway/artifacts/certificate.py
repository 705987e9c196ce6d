"""Certificate: records that every way of running the model predicts as the trained network does.

Each way is a hop, from the trained network over exported graphs to live HTTP. A hop is compared
with an earlier one on the test rows. `slipway/stages/verify.py` writes the certificate, and the
service is not ready without a certificate for its bundle. Files are named by digest, so a
certificate does not apply to other weights. It ends with a digest of itself, which detects damage
and edits, but not an edit by somebody who computes the digest again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import model_validator

from slipway.artifacts.bundle import LoadedBundle, Metric
from slipway.artifacts.gates import GateResult, Verdict, not_passed, require_verdict
from slipway.system import files
from slipway.system.contract import Contract, check_format, validate_record
from slipway.system.errors import CertificateError, GateMissedError, UnavailableError
from slipway.system.user_code import UserCode

FORMAT_VERSION = 5
REQUIRED = ("torch", "onnxruntime/cpu/fp32", "http")  # hops without which nothing is certified
_MAX_GATES_SHOWN = 3  # missed gates in one message; the certificate has all


class Execution(Contract):
    """The backend, provider, precision and variant of a model, as requested or as it ran."""

    backend: Literal[
        "torch",
        "onnxruntime",
        "tensorrt",
        "http",
        "grpc",
        "browser",
        "edge",
        "openvino",
        "triton",
        "kserve",
        "mlflow",
        "huggingface",
    ]
    provider: str  # "cpu", "cuda", "tensorrt"
    precision: str  # "fp32", "fp16", "int8"
    variant: str  # the bundle's variant, or "weights" for torch


class HopBounds(Contract):
    """The allowed differences of a hop from its reference. A bound that is null was not checked."""

    max_difference: float | None  # absolute, in the unit of the answers; with it no label may flip
    max_score_difference: float | None  # of an OOD score, absolute
    # Points of accuracy and of macro F1, or relative growth of the RMSE.
    max_metric_loss: float | None
    max_ood_fraction: float | None = None  # for the lower bound of `Hop.ood_fraction`


class BatchCheck(Contract):
    """The comparison of a hop with its reference, in batches of one size."""

    batch_size: int
    rows: int  # every test row, or as many as `verify.batch_seconds` allowed
    max_difference: float | None  # null if it is not finite
    flipped: int


class Hop(Contract):
    """One way of running the model on the test rows, compared with the trained network."""

    name: str  # "torch", "onnxruntime/cpu/fp16", "tensorrt/fp16", "http", "grpc"
    # uncertified: must not be served, and nothing serves it here.
    status: Literal["agrees", "differs", "uncertified", "not_executed"]
    reason: str  # of the status; for "agrees" empty, or a remark on too few rows
    requested: Execution
    actual: Execution | None  # null when not executed
    reference: str | None  # the hop it is compared with; null for the first
    allowed: HopBounds | None  # null for the first, and if nothing was compared
    rows: int
    # Absolute, of probabilities or in the target's unit; the largest over all batch sizes.
    max_difference: float | None
    mean_difference: float | None  # at the largest batch
    max_score_difference: float | None  # of an OOD score, as `max_difference`
    ood_fraction: Metric | None = None  # fraction of rows flagged; null without a threshold
    # Spearman correlation of the OOD scores with the reference's; null if either are all equal.
    score_rank: float | None = None
    flipped: list[str]  # ids of the rows whose label changed
    worst_row: str | None  # id of the row with the largest difference
    batches: list[BatchCheck]  # largest last; empty for the first, HTTP and gRPC
    metric: Metric | None  # accuracy, or RMSE for a numeric target
    # By metric: this hop less the first on the same rows, with the paired interval.
    metric_changes: dict[str, Metric]
    latency_ms: float | None  # median for one row
    rows_per_second: float | None  # at the largest batch


class Certificate(Contract):
    """The content of `certificate.json`: all hops, the digests of their files, and the machine."""

    format_version: Literal[5]
    status: Literal["certified", "draft", "refused"]  # draft: the HTTP hop has not run yet
    gates: Verdict  # only "passed" and "none" allow a release
    gate_results: list[GateResult]
    metric: str  # what `Hop.metric` is: "accuracy" or "rmse"
    bundle_digest: str  # hex SHA-256 of bundle.json
    engine_digest: str | None  # hex SHA-256 of engine_manifest.json; null without an engine
    digests: dict[str, str]  # hex SHA-256 by path of all files that the hops read
    user_code: list[UserCode]  # network, loss, metrics and transform of the user's own
    # Strategy, processes and rows a batch of each part of the training, such as "ddp on 2
    # processes with 16 rows a batch"; null in older certificates.
    training: list[str] | None = None
    hops: list[Hop]
    hardware: dict[str, str]
    versions: dict[str, str]

    @model_validator(mode="after")
    def _gates_fit(self) -> Self:
        require_verdict(self.gates, self.gate_results)
        return self


def first_fault(hops: Sequence[Hop]) -> Hop | None:
    """Return the first hop that prevents a certificate; None if there is none.

    Such a hop differs from its reference, or is required and was not executed.
    """
    for hop in hops:
        if hop.status == "differs" or (hop.status == "not_executed" and hop.name in REQUIRED):
            return hop
    return None


def why_uncertified(certificate: Certificate, execution: Execution) -> str | None:
    """Return the reason why `execution` must not be served; None if it may be served.

    If a variant has an `uncertified` hop, it is only allowed on the backends and providers on which
    `verify` saw it agree.
    """
    served = execution.backend, execution.provider, execution.variant
    of_variant = [hop for hop in certificate.hops if hop.requested.variant == execution.variant]
    for hop in of_variant:
        ran = hop.actual and (hop.actual.backend, hop.actual.provider, hop.actual.variant)
        if hop.status == "agrees" and ran == served:
            return None
    for hop in of_variant:
        if hop.status == "uncertified":
            return (
                f"the certificate says that {hop.name} is uncertified: {hop.reason}. "
                "Run `dvc repro --force verify` on such a machine."
            )
    return None


def require_agreement(certificate: Certificate, execution: Execution) -> None:
    """Raise UnavailableError unless the certificate has a hop of `execution` that agrees."""
    for hop in certificate.hops:
        if hop.actual == execution:
            if hop.status == "agrees":
                return
            raise UnavailableError(
                f"the certificate says that the export {hop.name} {hop.status}: {hop.reason}"
            )
    name = f"{execution.backend}/{execution.provider}/{execution.variant}"
    raise UnavailableError(
        f"the certificate has no run of {name}; run `dvc repro verify` on such a machine."
    )


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Write a certificate with its own digest, atomically."""
    files.write_bytes(path, _sealed(certificate.model_dump(mode="json")))


def read_certificate(path: Path) -> Certificate:
    """Read a certificate. Raises CertificateError if it is missing, malformed or altered."""
    try:
        payload = path.read_bytes()
    except FileNotFoundError:
        raise CertificateError(
            f"{path} is missing: nothing proves this bundle. Run `dvc repro verify`."
        ) from None
    content = check_format(Certificate, path, payload, CertificateError, "Run `dvc repro verify`.")
    content.pop("digest", None)
    if not _is_sealed(payload, content):
        raise CertificateError(
            f"{path} was altered: its own `digest` does not match. Run `dvc repro --force verify`."
        )
    return validate_record(Certificate, path, content, CertificateError, "Run `dvc repro verify`.")


def check_certificate(
    certificate: Certificate,
    bundle: LoadedBundle,
    *,
    accept_draft: bool,
    accept_missed_gates: bool = False,
) -> None:
    """Raise CertificateError unless it is for this bundle and every executed hop agrees.

    Raises GateMissedError unless its quality gates allow a release. `accept_missed_gates` is for
    shadowing and replaying, which release nothing. `accept_draft` is for the verify stage, whose
    HTTP hop needs a service before it can certify one; gates of a draft are not checked.
    """
    if certificate.bundle_digest != bundle.digest:
        raise CertificateError(
            f"the certificate is for bundle {certificate.bundle_digest[:12]}, this one is "
            f"{bundle.version}. Run `dvc repro verify`."
        )
    if certificate.status == "draft" and accept_draft:
        return
    if certificate.status == "certified":
        if not accept_missed_gates:
            _require_gates(certificate, bundle.version)
        return
    differing = ", ".join(hop.name for hop in certificate.hops if hop.status == "differs")
    detail = f"hops that differ: {differing}" if differing else "its HTTP hop has not run"
    raise CertificateError(
        f"the certificate of bundle {bundle.version} is {certificate.status!r}, expected "
        f"'certified' ({detail}). Run `dvc repro verify`."
    )


def _require_gates(certificate: Certificate, version: str) -> None:
    failed = not_passed(certificate.gate_results)
    if not failed:
        return
    shown = "; ".join(result.text for result in failed[:_MAX_GATES_SHOWN])
    hidden = len(failed) - _MAX_GATES_SHOWN
    more = f"; and {hidden} more" if hidden > 0 else ""
    raise GateMissedError(
        f"model {version} did not pass its quality gates ({certificate.gates}): {shown}{more}. "
        "It may be shadowed, replayed and compared, but not served, canaried, released or packed. "
        "Train a better model, or change the gate in params.yaml, then run `slipway run`."
    )


def _sealed(content: dict[str, Any]) -> bytes:
    """Return the certificate as canonical JSON that ends with its own digest."""
    return files.canonical_json(content | {"digest": files.digest_json(content)}).encode()


def _is_sealed(payload: bytes, content: dict[str, Any]) -> bool:
    try:
        return payload == _sealed(content)
    except ValueError:  # NaN, or half of a surrogate pair: what we never write
        return False
