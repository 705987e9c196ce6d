"""Reads and writes engine manifests: the graph, GPU and TensorRT that an engine was built for.

artifacts/engine/engine.plan            the engine
artifacts/engine/engine_manifest.json   source graph, GPU and TensorRT of the engine
artifacts/engine/skipped_build.json     instead of both if no engine could be built: the reason

An engine is refused unless graph, TensorRT, GPU, precision and its own bytes match its manifest:
TensorRT would silently run a stale engine of the same architecture. Both JSON files record what was
requested, so that another machine can build it.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution
from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import EngineError, IntegrityError, UnavailableError

FORMAT_VERSION = 2
PLAN = "engine.plan"
ENGINE_MANIFEST = "engine_manifest.json"
SKIPPED_BUILD = "skipped_build.json"
_FIX = "Run `dvc repro --force compile`."


class Profile(Contract):
    """Batch sizes in rows: the range that an engine accepts, and the size it is optimised for."""

    smallest: int
    optimal: int
    largest: int

    @model_validator(mode="after")
    def _is_ordered(self) -> Self:
        if not 1 <= self.smallest <= self.optimal <= self.largest:
            raise ValueError(
                f"profile {self.smallest}/{self.optimal}/{self.largest}, "
                "expected 1 <= smallest <= optimal <= largest"
            )
        return self


class EngineMachine(Contract):
    """The GPU, driver and library versions that a TensorRT engine depends on."""

    tensorrt_version: str
    cuda_version: str  # of the CUDA runtime library
    driver_version: str  # "580.95.05"
    driver_cuda_version: str  # the newest that the driver supports
    gpu: str
    compute_capability: str  # "9.0"


class EngineRequest(Contract):
    """The engine that was requested, independent of the machine that builds it."""

    requested: Execution
    profile: Profile
    workspace_mib: int  # scratch memory of the builder


class EngineManifest(EngineRequest):
    """The content of `engine_manifest.json`: what the engine was built from, and for which GPU."""

    format_version: Literal[2]
    engine_sha256: str
    model_sha256: str  # of the source ONNX graph
    bundle_digest: str  # of the bundle that the graph came from; for the record
    machine: EngineMachine
    actual: Execution
    precision_read_from: Literal["engine", "network"]  # source of `actual.precision`


class SkippedBuild(EngineRequest):
    """The content of `skipped_build.json`: the requested engine and the reason it was not built."""

    format_version: Literal[2]
    status: Literal["not_executed"]
    reason: str


# Ends of reasons that no other machine removes.
CPU_ONLY = "meant for the CPU only"
NO_GRAPH = "the bundle has no such graph"


def write_engine(root: Path, plan: bytes, engine_manifest: EngineManifest) -> None:
    """Write an engine to `root`, then its manifest, so that a manifest is never without engine."""
    files.write_bytes(root / PLAN, plan)
    files.write_json(root / ENGINE_MANIFEST, engine_manifest.model_dump(mode="json"))


def write_skipped_build(root: Path, request: EngineRequest, reason: str) -> None:
    """Write `skipped_build.json`, with the request and the reason why no engine was built."""
    skipped_build = SkippedBuild(
        format_version=FORMAT_VERSION, status="not_executed", reason=reason, **dict(request)
    )
    files.write_json(root / SKIPPED_BUILD, skipped_build.model_dump(mode="json"))


def read_skipped_build(root: Path) -> SkippedBuild | None:
    """Return the reason why `root` has no engine.

    Returns None if it has one. Raises EngineError if malformed.
    """
    path = root / SKIPPED_BUILD
    if not path.exists():
        return None
    return parse_record(SkippedBuild, path, path.read_bytes(), EngineError, _FIX)


def read_engine_manifest(root: Path, digest: str | None = None) -> EngineManifest:
    """Read the manifest of the engine in `root`; with `digest`, only the certified one.

    Raises UnavailableError if no engine was built, EngineError for a malformed file, and
    IntegrityError for another digest.
    """
    skipped_build = read_skipped_build(root)
    if skipped_build is not None:
        advice = "Run `dvc repro compile` on a machine with a GPU and TensorRT."
        if skipped_build.reason.endswith((CPU_ONLY, NO_GRAPH)):
            advice = "No machine can build one."
        raise UnavailableError(f"{root} holds no engine: {skipped_build.reason}. {advice}")
    path = root / ENGINE_MANIFEST
    if not path.exists():
        raise UnavailableError(
            f"{path} is missing: {root} holds no engine. Run `dvc repro compile`."
        )
    payload = path.read_bytes()
    found = files.sha256_bytes(payload)
    if digest not in (None, found):
        raise IntegrityError(
            f"the engine in {root} is not the certified one: {ENGINE_MANIFEST} has the SHA-256 "
            f"{found}, the certificate names {digest}. "
            "Run `dvc repro verify`, or restore the certified engine."
        )
    return parse_record(EngineManifest, path, payload, EngineError, _FIX)


def read_request(root: Path) -> EngineRequest:
    """Read the requested properties of an engine, whether or not it was built.

    Raises the errors of `read_engine_manifest`.
    """
    return read_skipped_build(root) or read_engine_manifest(root)


def check_origin(engine_manifest: EngineManifest, bundle: LoadedBundle) -> None:
    """Raise EngineError unless the engine was built from this bundle, as requested.

    The message names each difference.
    """
    variant = engine_manifest.actual.variant
    model = bundle.manifest.models.get(variant)
    missing = f"no variant {variant!r}"
    differing = differences(
        {
            "model digest": (engine_manifest.model_sha256, model.sha256 if model else missing),
            "precision": (engine_manifest.actual.precision, model.precision if model else missing),
            "largest batch": (engine_manifest.profile.largest, bundle.manifest.max_batch_size),
            "requested execution": (engine_manifest.actual, engine_manifest.requested),
        }
    )
    if differing:
        raise EngineError(
            f"the engine is not of bundle {bundle.version}. {differing}. Run `dvc repro compile`."
        )


def check_machine(engine_manifest: EngineManifest, machine: EngineMachine) -> None:
    """Raise EngineError, naming each difference, unless the engine is for this GPU and TensorRT."""
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
    """Read the engine's bytes. Raises EngineError if missing, IntegrityError if altered."""
    path = root / PLAN
    try:
        return files.read_verified(path, engine_manifest.engine_sha256)
    except FileNotFoundError:
        raise EngineError(f"{path} is missing, but {ENGINE_MANIFEST} is there. {_FIX}") from None


def differences(pairs: dict[str, tuple[object, object]]) -> str:
    """Return the names whose two values differ, with both values, as text; "" if all are equal."""
    return "; ".join(
        f"{name}: built with {built}, here {here}"
        for name, (built, here) in pairs.items()
        if built != here
    )
