"""compile: builds a TensorRT engine from the bundle, or records why the build was skipped.

Without params.yaml, as in a container, the settings are read from the engine manifest or the record
of the skipped build beside the bundle. The engine is then built for the local GPU, and certified on
the golden rows.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from slipway.artifacts.bundle import LoadedBundle, Precision, load_bundle
from slipway.artifacts.certificate import Execution
from slipway.artifacts.engine_manifest import (
    CPU_ONLY,
    NO_GRAPH,
    EngineRequest,
    Profile,
    write_skipped_build,
)
from slipway.artifacts.locations import BUNDLE, ENGINE, REBUILT_ENGINE
from slipway.config.stage_run import run_stage
from slipway.runtimes.compilation import compile_engine, why_no_engine
from slipway.runtimes.rebuild import rebuild_engine
from slipway.system import files
from slipway.system.command_run import run_command
from slipway.system.errors import EngineError

if TYPE_CHECKING:
    from slipway.config.params import Params

_PRECISION: dict[str, Precision] = {"fp32": "fp32", "fp16": "fp16", "int8_tensorrt": "int8"}
TIMING_CACHE = Path(".work/compile/timing.cache")


def run(params: "Params") -> None:
    """Build the engine of `compile.variant`, or record why the build was skipped.

    Raises UnavailableError if no engine can be built and `compile.require` is true.
    """
    bundle = load_bundle(BUNDLE)
    # Checks that the model exists and is unaltered, even if the build is skipped.
    variant = params.compile.variant
    reason = _why_no_graph(variant, bundle)
    if reason and params.compile.require:
        raise EngineError(
            f"compile.require is true, but no engine can be built of {variant}: {reason}. "
            "Set it to false to record a skipped build, or use another network."
        )
    if reason is None or variant in bundle.manifest.models:
        bundle.model_bytes(variant)
    request = _request(params, bundle)
    reason = reason or why_no_engine(require=params.compile.require)
    with files.new_directory(ENGINE) as folder:
        if reason:
            write_skipped_build(folder, request, reason)
        else:
            compile_engine(folder, bundle, request, TIMING_CACHE)
    if reason is None:  # else `verify` says it, with all that cannot run here
        print(f"tensorrt/{params.compile.variant}: compiled into {ENGINE}")


def _why_no_graph(variant: str, bundle: LoadedBundle) -> str | None:
    """Return why no graph of the bundle can be built by TensorRT; None if one can."""
    models, left_out = bundle.manifest.models, bundle.manifest.left_out
    if variant not in models and variant in left_out:
        return f"{left_out[variant]}; {NO_GRAPH}"
    if variant in models and "tensorrt" not in models[variant].meant_for:
        return f"TensorRT cannot run the graph {variant}, which is {CPU_ONLY}"
    return None


def _request(params: "Params", bundle: LoadedBundle) -> EngineRequest:
    variant = params.compile.variant
    precision = _PRECISION[variant]
    return EngineRequest(
        requested=Execution(
            backend="tensorrt", provider="tensorrt", precision=precision, variant=variant
        ),
        profile=Profile(
            smallest=1,
            optimal=params.compile.optimal_batch_size,
            largest=bundle.manifest.max_batch_size,
        ),
        workspace_mib=params.compile.workspace_mib,
    )


def _rebuild() -> None:
    certificate = rebuild_engine(BUNDLE, ENGINE, REBUILT_ENGINE)
    print(
        f"tensorrt/{certificate.execution.variant}: compiled and certified on "
        f"{certificate.golden_rows.rows} golden rows, into {REBUILT_ENGINE}"
    )


if __name__ == "__main__":
    if Path("params.yaml").exists() or not ENGINE.exists():
        run_stage(run)
    else:
        run_command(_rebuild)
