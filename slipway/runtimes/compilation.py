"""Compiles a bundle's graph to an engine with its manifest."""

from pathlib import Path

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.engine_manifest import (
    FORMAT_VERSION,
    EngineManifest,
    EngineRequest,
    write_engine,
)
from slipway.runtimes.runtime import this_machine, why_unavailable
from slipway.runtimes.tensorrt import BuildRequest, build_engine_apart
from slipway.system import files
from slipway.system.errors import EngineError


def why_no_engine(*, require: bool) -> str | None:
    """Return the reason why no TensorRT engine can be built on this machine; None if one can.

    With `require`, raises EngineError with the reason instead of returning it.
    """
    reason = why_unavailable("tensorrt")
    if reason and require:
        raise EngineError(
            f"compile.require is true, but no engine can be built here: {reason}. "
            "Set it to false to record a skipped build."
        )
    return reason


def compile_engine(
    folder: Path,
    bundle: LoadedBundle,
    request: EngineRequest,
    timing_cache: Path,
    module: str = "tensorrt",
) -> EngineManifest:
    """Build the requested engine for this GPU into `folder`, with the TensorRT in `module`.

    Reads and updates `timing_cache`. Raises EngineError with TensorRT's message, or if its process
    crashed.
    """
    variant = request.requested.variant
    build = BuildRequest(
        model=bundle.model_bytes(variant),
        input_name=bundle.manifest.input_name,
        row_shape=bundle.manifest.input.shape,
        precision=request.requested.precision,
        profile=request.profile,
        workspace_bytes=request.workspace_mib << 20,
        timing_cache=timing_cache.read_bytes() if timing_cache.exists() else b"",
    )
    built = build_engine_apart(module, build)
    files.write_bytes(timing_cache, built.timing_cache)
    engine_manifest = EngineManifest(
        format_version=FORMAT_VERSION,
        engine_sha256=files.sha256_bytes(built.plan),
        model_sha256=bundle.manifest.models[variant].sha256,
        bundle_digest=bundle.digest,
        profile=request.profile,
        workspace_mib=request.workspace_mib,
        machine=this_machine(),
        requested=request.requested,
        actual=request.requested.model_copy(update={"precision": built.precision}),
        precision_read_from=built.precision_read_from,
    )
    write_engine(folder, built.plan, engine_manifest)
    return engine_manifest
