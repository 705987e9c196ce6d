"""Selects the runtime and the variant of the bundle, and records the reason.

A provider or variant that is set by name is used, or loading fails. `auto` takes the first that
runs here *and* is certified to agree; on each provider it starts with the variant that export
chose. The log and `/model` show the candidates that it passed over, with reasons.

A file that changed after certification is an error, not a reason to try the next candidate. An
engine of another machine may be replaced by one that was built and certified on this machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slipway.artifacts.bundle import Bundle, LoadedBundle
from slipway.artifacts.certificate import (
    Certificate,
    Execution,
    require_agreement,
    why_uncertified,
)
from slipway.artifacts.engine_manifest import read_engine_manifest, read_request
from slipway.predictor.options import ModelOptions
from slipway.runtimes import engine_runner, runtime
from slipway.runtimes.rebuild import TargetCertificate, open_rebuilt
from slipway.runtimes.runtime import ONNX_TENSORRT, Runner
from slipway.system.errors import EngineError, UnavailableError

_Provider = Literal["tensorrt", "onnxruntime_tensorrt", "cuda", "cpu"]


@dataclass(frozen=True)
class Selection:
    """A loaded runner and the reasons for selecting it."""

    runner: Runner
    requested: dict[str, str]
    passed_over: list[str]  # preferred candidates and reasons, as "cuda/fp16: no NVIDIA driver"
    why: str  # reason for selecting this candidate
    target_certificate: TargetCertificate | None = None  # of an engine built on this machine

    @property
    def actual(self) -> Execution:
        """The backend, provider and variant that run."""
        return self.runner.actual


def select(options: ModelOptions, bundle: LoadedBundle, certificate: Certificate) -> Selection:
    """Load the first candidate that can run and is certified.

    Raises UnavailableError with all reasons if there is none, IntegrityError or BundleError if a
    file is not the certified one.
    """
    passed_over: list[str] = []
    requested: dict[str, str] = {"provider": options.provider, "variant": options.variant}
    for provider, variant in _candidates(options, bundle.manifest):
        try:
            runner, target = _open(options, bundle, certificate, provider, variant)
            why = _why(options, bundle.manifest, runner.actual)
            return Selection(runner, requested, passed_over, why, target)
        except (UnavailableError, EngineError) as error:
            passed_over.append(f"{provider}/{variant}: {error}")
    raise UnavailableError(
        f"provider {options.provider!r} with variant {options.variant!r} was requested and "
        f"cannot be served. {' '.join(passed_over)}"
    )


def _candidates(options: ModelOptions, manifest: Bundle) -> Iterator[tuple[str, str]]:
    """Yield (provider, variant), most preferred first.

    `auto` excludes ONNX Runtime's TensorRT provider, which takes minutes to start.
    """
    providers: list[_Provider] = ["tensorrt", "onnxruntime_tensorrt", "cuda", "cpu"]
    for provider in providers:
        is_auto = options.provider == "auto" and provider != ONNX_TENSORRT
        if options.provider != provider and not is_auto:
            continue
        is_named = options.variant != "auto"
        variants = [options.variant] if is_named else _variants(provider, manifest)
        yield from ((provider, variant) for variant in variants)


def _variants(provider: _Provider, manifest: Bundle) -> list[str]:
    """Return the variants that `auto` tries on a provider, in order.

    If export chose a variant for this provider, it comes first, then fp32. Otherwise the order is
    fixed.
    """
    if provider == "tensorrt":
        return ["any"]
    if provider == "onnxruntime_tensorrt":
        return ["fp16"]
    choice = manifest.choice.get(provider)
    if choice:
        return list(dict.fromkeys([choice.variant, "fp32"]))
    return ["fp16", "fp32"] if provider == "cuda" else ["fp32"]


def _why(options: ModelOptions, manifest: Bundle, actual: Execution) -> str:
    if options.variant != "auto":
        return "set by name"
    if actual.backend == "tensorrt":
        return "the engine's own variant"
    if actual.provider == "tensorrt":
        return "the first variant that ONNX Runtime's TensorRT provider computes unchanged"
    choice = {str(provider): choice for provider, choice in manifest.choice.items()}.get(
        actual.provider
    )
    if choice is None:
        return (
            f"{actual.provider} was not available at export, so export chose no variant for it: "
            "the first that runs, in a fixed order"
        )
    if choice.variant == actual.variant:
        return f"chosen at export. {choice.reason}"
    return f"export chose {choice.variant} for {actual.provider}, which was passed over"


def _open(
    options: ModelOptions,
    bundle: LoadedBundle,
    certificate: Certificate,
    provider: str,
    variant: str,
) -> tuple[Runner, TargetCertificate | None]:
    if provider == "tensorrt":
        return _open_engine(options, bundle, certificate, variant)
    reason = runtime.why_unavailable(provider)
    if reason:
        raise UnavailableError(f"{reason}.")
    if variant not in bundle.manifest.models:
        left_out = bundle.manifest.left_out.get(variant)
        reason = f"; it was left out: {left_out}" if left_out else ""
        raise UnavailableError(
            "the bundle has no such variant, it has "
            f"{', '.join(sorted(bundle.manifest.models))}{reason}."
        )
    runner = _open_onnx(options, bundle, provider, variant)
    require_agreement(certificate, runner.actual)
    return runner, None


def _open_onnx(options: ModelOptions, bundle: LoadedBundle, provider: str, variant: str) -> Runner:
    num_threads = options.num_threads
    if provider == ONNX_TENSORRT:
        profile = read_request(options.engine).profile
        return runtime.open_onnx_tensorrt(
            bundle, variant, profile, options.engine_cache, num_threads
        )
    return runtime.open_onnx(
        bundle.model_bytes(variant),
        variant=variant,
        precision=bundle.manifest.models[variant].precision,
        provider=provider,
        num_threads=num_threads,
    )


def _open_engine(
    options: ModelOptions, bundle: LoadedBundle, certificate: Certificate, variant: str
) -> tuple[Runner, TargetCertificate | None]:
    runner: Runner
    target = None
    try:
        runner = _open_certified_engine(options, bundle, certificate)
    except (UnavailableError, EngineError) as error:
        if not options.rebuilt_engine.exists():
            raise
        try:
            runner, target = open_rebuilt(options.rebuilt_engine, bundle)
        except (UnavailableError, EngineError) as here:
            raise EngineError(
                f"{error} The engine that was built here cannot be used either: {here}"
            ) from None
        if uncertified := why_uncertified(certificate, runner.actual):
            raise UnavailableError(
                f"the engine that was built here cannot be served: {uncertified}"
            ) from None
    if variant not in ("any", runner.actual.variant):
        raise UnavailableError(
            f"the engine in {options.engine} is of variant {runner.actual.variant!r}, and "
            f"{variant!r} was requested."
        )
    return runner, target


def _open_certified_engine(
    options: ModelOptions, bundle: LoadedBundle, certificate: Certificate
) -> Runner:
    if certificate.engine_digest is None:
        read_engine_manifest(options.engine)  # raises if there is no engine
        raise UnavailableError(
            f"the certificate does not cover the engine in {options.engine}; run "
            "`dvc repro verify`."
        )
    runner = engine_runner.open_engine(options.engine, bundle, certificate.engine_digest)
    require_agreement(certificate, runner.actual)
    return runner
