"""The engine's passport: what a TensorRT engine was built from and for; this is its only reader and writer.

artifacts/engine/engine.plan     the engine
artifacts/engine/passport.json   what it was built from, on which GPU, with which TensorRT
artifacts/engine/receipt.json    instead of both where no engine could be built: why not; never a pass

An engine is refused unless model, TensorRT, GPU, precision and its own bytes are exactly those of its passport:
TensorRT would run a stale engine of the same architecture without a word. Passport and receipt say what was requested, so
that another machine can build the same.
"""

import json
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import ValidationError, model_validator

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import EngineError, IntegrityError, UnavailableError

FORMAT_VERSION = 2
PLAN = "engine.plan"
PASSPORT = "passport.json"
RECEIPT = "receipt.json"
Record = TypeVar("Record", "Passport", "Receipt")


class Profile(Contract):
    """Batch sizes that an engine takes and the one it is tuned for."""

    smallest: int
    optimal: int
    largest: int

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if not 1 <= self.smallest <= self.optimal <= self.largest:
            raise ValueError(
                f"profile {self.smallest}/{self.optimal}/{self.largest}, expected 1 <= smallest <= optimal <= largest"
            )
        return self


class Machine(Contract):
    """The part of a machine that an engine is bound to."""

    tensorrt_version: str
    cuda_version: str  # of the CUDA runtime library
    driver_version: str  # "580.95.05"
    driver_cuda_version: str  # the newest that the driver supports
    gpu: str
    compute_capability: str  # "9.0"


class EngineRequest(Contract):
    """What an engine is to be, wherever it is built."""

    requested: Execution
    profile: Profile
    workspace_mib: int  # scratch memory the builder may use


class Passport(EngineRequest):
    """The content of `passport.json`."""

    format_version: Literal[2]
    engine_sha256: str
    model_sha256: str  # of the ONNX graph it was built from
    bundle_digest: str  # of the bundle that graph came from; for the record
    machine: Machine
    actual: Execution
    precision_read_from: Literal["engine", "network"]  # where `actual.precision` was seen


class Receipt(EngineRequest):
    """The content of `receipt.json`."""

    format_version: Literal[2]
    status: Literal["not_executed"]
    reason: str


def write_engine(root: Path, plan: bytes, passport: Passport) -> None:
    """Write an engine and, last, its passport."""
    files.write_bytes(root / PLAN, plan)
    files.write_json(root / PASSPORT, passport.model_dump(mode="json"))


def write_receipt(root: Path, request: EngineRequest, reason: str) -> None:
    """Write down that no engine was built, and why."""
    receipt = Receipt(
        format_version=FORMAT_VERSION, status="not_executed", reason=reason, **dict(request)
    )
    files.write_json(root / RECEIPT, receipt.model_dump(mode="json"))


def read_receipt(root: Path) -> Receipt | None:
    """Why there is no engine in `root`, or None if there is one; EngineError if the receipt is not understood."""
    path = root / RECEIPT
    if not path.exists():
        return None
    return _parse(Receipt, path, path.read_bytes())


def read_passport(root: Path, digest: str | None = None) -> Passport:
    """The passport in `root`; with `digest`, the very one that was certified, and through it the very engine.

    UnavailableError where no engine was built, EngineError if it is not understood, IntegrityError if it has another digest.
    """
    receipt = read_receipt(root)
    if receipt is not None:
        raise UnavailableError(
            f"{root} holds no engine: {receipt.reason}. Run `dvc repro compile` on a machine with a GPU and TensorRT."
        )
    path = root / PASSPORT
    if not path.exists():
        raise UnavailableError(
            f"{path} is missing: {root} holds no engine. Run `dvc repro compile`."
        )
    payload = path.read_bytes()
    found = files.sha256_bytes(payload)
    if digest not in (None, found):
        raise IntegrityError(
            f"the engine in {root} is not the one that was certified: {PASSPORT} has the SHA-256 {found}, the certificate names {digest}. "
            "Run `dvc repro verify`, or put the certified engine back."
        )
    return _parse(Passport, path, payload)


def read_request(root: Path) -> EngineRequest:
    """What the engine in `root` was to be, whether it was built or not; UnavailableError or EngineError as `read_passport`."""
    return read_receipt(root) or read_passport(root)


def check_origin(passport: Passport, bundle: LoadedBundle) -> None:
    """EngineError, naming every difference, unless the engine was built from this bundle's graph, as it was requested."""
    variant = passport.actual.variant
    model = bundle.manifest.models.get(variant)
    differing = differences(
        {
            "model digest": (
                passport.model_sha256,
                model.sha256 if model else f"no variant {variant!r}",
            ),
            "precision": (
                passport.actual.precision,
                model.precision if model else f"no variant {variant!r}",
            ),
            "largest batch": (passport.profile.largest, bundle.manifest.max_batch_size),
            "requested execution": (passport.actual, passport.requested),
        }
    )
    if differing:
        raise EngineError(
            f"the engine is not of bundle {bundle.version}. {differing}. Run `dvc repro compile`."
        )


def check_machine(passport: Passport, machine: Machine) -> None:
    """EngineError, naming every difference, unless the engine was built for this very GPU and TensorRT."""
    built = passport.machine
    differing = differences(
        {
            "TensorRT": (built.tensorrt_version, machine.tensorrt_version),
            "GPU": (built.gpu, machine.gpu),
            "compute capability": (built.compute_capability, machine.compute_capability),
        }
    )
    if differing:
        raise EngineError(
            f"the engine is for another machine. {differing}. Run `dvc repro --force compile` here."
        )


def read_plan(root: Path, passport: Passport) -> bytes:
    """The engine, the very bytes its passport was written for; EngineError if it is missing, IntegrityError if altered."""
    path = root / PLAN
    try:
        return files.read_verified(path, passport.engine_sha256)
    except FileNotFoundError:
        raise EngineError(
            f"{path} is missing, but {PASSPORT} is there. Run `dvc repro --force compile`."
        ) from None


def differences(pairs: dict[str, tuple[object, object]]) -> str:
    """Each name whose two values are not the same, with both; empty where all are."""
    return "; ".join(
        f"{name}: built with {built}, here {here}"
        for name, (built, here) in pairs.items()
        if built != here
    )


def _parse(kind: type[Record], path: Path, payload: bytes) -> Record:
    try:
        return kind.model_validate(_decode(path, payload))
    except ValidationError as error:
        raise EngineError(
            f"{path} is not a valid {kind.__name__.lower()}: {error}. Run `dvc repro --force compile`."
        ) from error


def _decode(path: Path, payload: bytes) -> Any:
    try:
        content = json.loads(payload)
    except ValueError as error:
        raise EngineError(
            f"{path} is not JSON: {error}. Run `dvc repro --force compile`."
        ) from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise EngineError(
            f"{path} has format version {version!r}, this Slipway reads version {FORMAT_VERSION}. Compile it again."
        )
    return content
