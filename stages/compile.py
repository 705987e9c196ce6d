"""Bundle to TensorRT engine with its passport, or a receipt that says why there is none."""

from pathlib import Path

from slipway import files
from slipway.bundle import LoadedBundle, load_bundle
from slipway.certificate import Execution
from slipway.command import run_stage
from slipway.errors import EngineError
from slipway.params import Params
from slipway.passport import FORMAT_VERSION, Passport, Profile, write_engine, write_receipt
from slipway.runtime import this_machine, why_unavailable

BUNDLE = Path("artifacts/bundle")
ENGINE = Path("artifacts/engine")
TIMING_CACHE = Path(".work/compile/timing.cache")


def run(params: Params) -> None:
    """Compile `compile.variant`, or leave a receipt unless `compile.require`."""
    bundle = load_bundle(BUNDLE)
    variant = params.compile.variant
    model = bundle.model_bytes(variant)
    precision = bundle.manifest.models[variant].precision
    requested = Execution(backend="tensorrt", provider="tensorrt", precision=precision, variant=variant)
    reason = why_unavailable("tensorrt")
    if reason and params.compile.require:
        raise EngineError(f"compile.require is true, but no engine can be built here: {reason}. Set it to false to leave a receipt.")
    with files.new_directory(ENGINE) as folder:
        if reason:
            write_receipt(folder, requested, reason)
        else:
            _compile(folder, params, bundle, model, requested)
    print(f"tensorrt/{variant}: " + (f"not executed, {reason}" if reason else f"compiled into {ENGINE}"))


def _compile(folder: Path, params: Params, bundle: LoadedBundle, model: bytes, requested: Execution) -> None:
    from slipway.export.tensorrt_engine import BuildRequest, build_engine_apart

    largest = bundle.manifest.max_batch_size
    profile = Profile(smallest=1, optimal=params.compile.optimal_batch_size, largest=largest)
    request = BuildRequest(
        model=model,
        input_name=bundle.manifest.input_name,
        row_shape=bundle.manifest.input.shape,
        profile=profile,
        workspace_bytes=params.compile.workspace_mib << 20,
        timing_cache=TIMING_CACHE.read_bytes() if TIMING_CACHE.exists() else b"",
    )
    built = build_engine_apart("tensorrt", request)
    files.write_bytes(TIMING_CACHE, built.timing_cache)
    passport = Passport(
        format_version=FORMAT_VERSION,
        engine_sha256=files.sha256_bytes(built.plan),
        model_sha256=bundle.manifest.models[requested.variant].sha256,
        bundle_digest=bundle.digest,
        profile=profile,
        machine=this_machine(),
        requested=requested,
        actual=requested,  # a strongly typed network has its graph's precision and no other
    )
    write_engine(folder, built.plan, passport)


if __name__ == "__main__":
    run_stage(run)
