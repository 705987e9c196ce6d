"""The engine's manifest: what a TensorRT engine was built from and for; this is its only reader and writer.

artifacts/engine/engine.plan     the engine
artifacts/engine/engine_manifest.json   what it was built from, on which GPU, with which TensorRT
artifacts/engine/skipped_build.json    instead of both where no engine could be built: why not; never a pass

An engine is refused unless model, TensorRT, GPU, precision and its own bytes are exactly those of its manifest:
TensorRT would run a stale engine of the same architecture without a word. The engine manifest and the skipped build say what was requested, so
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
ENGINE_MANIFEST = "engine_manifest.json"
SKIPPED_BUILD = "skipped_build.json"
Record = TypeVar("Record", "EngineManifest", "SkippedBuild")


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


class EngineMachine(Contract):
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


class EngineManifest(EngineRequest):
    """The content of `engine_manifest.json`."""

    format_version: Literal[2]
    engine_sha256: str
    model_sha256: str  # of the ONNX graph it was built from
    bundle_digest: str  # of the bundle that graph came from; for the record
    machine: EngineMachine
    actual: Execution
    precision_read_from: Literal["engine", "network"]  # where `actual.precision` was seen


class SkippedBuild(EngineRequest):
    """The content of `skipped_build.json`."""

    format_version: Literal[2]
    status: Literal["not_executed"]
    reason: str


def write_engine(root: Path, plan: bytes, engine_manifest: EngineManifest) -> None:
    """Write an engine and, last, its manifest."""
    files.write_bytes(root / PLAN, plan)
    files.write_json(root / ENGINE_MANIFEST, engine_manifest.model_dump(mode="json"))


def write_skipped_build(root: Path, request: EngineRequest, reason: str) -> None:
    """Write down that no engine was built, and why."""
    skipped_build = SkippedBuild(
        format_version=FORMAT_VERSION, status="not_executed", reason=reason, **dict(request)
    )
    files.write_json(root / SKIPPED_BUILD, skipped_build.model_dump(mode="json"))


def read_skipped_build(root: Path) -> SkippedBuild | None:
    """Why there is no engine in `root`, or None if there is one; EngineError if the skipped build is not understood."""
    path = root / SKIPPED_BUILD
    if not path.exists():
        return None
    return _parse(SkippedBuild, path, path.read_bytes())


def read_engine_manifest(root: Path, digest: str | None = None) -> EngineManifest:
    """The engine manifest in `root`; with `digest`, the very one that was certified, and through it the very engine.

    UnavailableError where no engine was built, EngineError if it is not understood, IntegrityError if it has another digest.
    """
    skipped_build = read_skipped_build(root)
    if skipped_build is not None:
        raise UnavailableError(
            f"{root} holds no engine: {skipped_build.reason}. Run `dvc repro compile` on a machine with a GPU and TensorRT."
        )
    path = root / ENGINE_MANIFEST
    if not path.exists():
        raise UnavailableError(
            f"{path} is missing: {root} holds no engine. Run `dvc repro compile`."
        )
    payload = path.read_bytes()
    found = files.sha256_bytes(payload)
    if digest not in (None, found):
        raise IntegrityError(
            f"the engine in {root} is not the one that was certified: {ENGINE_MANIFEST} has the SHA-256 {found}, the certificate names {digest}. "
            "Run `dvc repro verify`, or put the certified engine back."
        )
    return _parse(EngineManifest, path, payload)


def read_request(root: Path) -> EngineRequest:
    """What the engine in `root` was to be, whether it was built or not; UnavailableError or EngineError as `read_engine_manifest`."""
    return read_skipped_build(root) or read_engine_manifest(root)


def check_origin(engine_manifest: EngineManifest, bundle: LoadedBundle) -> None:
    """EngineError, naming every difference, unless the engine was built from this bundle's graph, as it was requested."""
    variant = engine_manifest.actual.variant
    model = bundle.manifest.models.get(variant)
    differing = differences(
        {
            "model digest": (
                engine_manifest.model_sha256,
                model.sha256 if model else f"no variant {variant!r}",
            ),
            "precision": (
                engine_manifest.actual.precision,
                model.precision if model else f"no variant {variant!r}",
            ),
            "largest batch": (engine_manifest.profile.largest, bundle.manifest.max_batch_size),
            "requested execution": (engine_manifest.actual, engine_manifest.requested),
        }
    )
    if differing:
        raise EngineError(
            f"the engine is not of bundle {bundle.version}. {differing}. Run `dvc repro compile`."
        )


def check_machine(engine_manifest: EngineManifest, machine: EngineMachine) -> None:
    """EngineError, naming every difference, unless the engine was built for this very GPU and TensorRT."""
    built = engine_manifest.machine
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


def read_plan(root: Path, engine_manifest: EngineManifest) -> bytes:
    """The engine, the very bytes its manifest was written for; EngineError if it is missing, IntegrityError if altered."""
    path = root / PLAN
    try:
        return files.read_verified(path, engine_manifest.engine_sha256)
    except FileNotFoundError:
        raise EngineError(
            f"{path} is missing, but {ENGINE_MANIFEST} is there. Run `dvc repro --force compile`."
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
