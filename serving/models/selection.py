"""Which runtime and which variant of the bundle answer: what was asked for, what came out, and why.

What is asked for by name is done or refused. `auto` takes the first that is possible here *and* that
the certificate says agrees, on each provider beginning with what export chose for it; what it passes over is kept with the
reason and shown in the log and in /model.
A file that was altered or swapped since it was certified is never passed over: nothing is served then. Where the engine is
another machine's, one that was built and certified on this machine takes its place.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from serving.settings import Settings
from slipway.artifacts.bundle import Bundle, LoadedBundle
from slipway.artifacts.certificate import Certificate, Execution, why_uncertified
from slipway.artifacts.engine_manifest import read_engine_manifest, read_request
from slipway.runtimes import runtime
from slipway.runtimes.rebuild import TargetCertificate, open_rebuilt
from slipway.runtimes.runtime import ONNX_TENSORRT, Runner
from slipway.system.errors import EngineError, UnavailableError

_Provider = Literal["tensorrt", "onnxruntime_tensorrt", "cuda", "cpu"]


@dataclass(frozen=True)
class Selection:
    """A model that is loaded, and how it came to be the one."""

    runner: Runner
    requested: dict[str, str]
    passed_over: list[str]  # "cuda/fp16: no NVIDIA driver", in the order of preference
    why: str  # of what runs
    target_certificate: TargetCertificate | None = (
        None  # of an engine that was built on this machine
    )

    @property
    def actual(self) -> Execution:
        """What really runs."""
        return self.runner.actual


def select(settings: Settings, bundle: LoadedBundle, certificate: Certificate) -> Selection:
    """Load the first candidate that is possible and certified.

    UnavailableError with all reasons if there is none; IntegrityError or BundleError if a file is not the certified one.
    """
    passed_over: list[str] = []
    requested: dict[str, str] = {"provider": settings.provider, "variant": settings.variant}
    for provider, variant in _candidates(settings, bundle.manifest):
        try:
            runner, target = _open(settings, bundle, certificate, provider, variant)
            return Selection(
                runner,
                requested,
                passed_over,
                _why(settings, bundle.manifest, runner.actual),
                target,
            )
        except (UnavailableError, EngineError) as error:
            passed_over.append(f"{provider}/{variant}: {error}")
    raise UnavailableError(
        f"provider {settings.provider!r} with variant {settings.variant!r} was asked for and cannot be served. "
        + " ".join(passed_over)
    )


def _candidates(settings: Settings, manifest: Bundle) -> Iterator[tuple[str, str]]:
    """(provider, variant) from the most to the least preferred; what takes minutes to start only where it is asked for."""
    providers: list[_Provider] = ["tensorrt", "onnxruntime_tensorrt", "cuda", "cpu"]
    for provider in providers:
        if settings.provider == provider or (
            settings.provider == "auto" and provider != ONNX_TENSORRT
        ):
            for variant in (
                _variants(provider, manifest) if settings.variant == "auto" else [settings.variant]
            ):
                yield provider, variant


def _variants(provider: _Provider, manifest: Bundle) -> list[str]:
    """What `auto` tries on a provider: export's choice and then fp32, which loses nothing; where there is none, a fixed order."""
    if provider == "tensorrt":
        return ["any"]
    if provider == "onnxruntime_tensorrt":
        return ["fp16"]
    choice = manifest.choice.get(provider)
    if choice:
        return list(dict.fromkeys([choice.variant, "fp32"]))
    return {ONNX_TENSORRT: ["fp16"], "cuda": ["fp16", "fp32"]}.get(provider, ["fp32"])


def _why(settings: Settings, manifest: Bundle, actual: Execution) -> str:
    if settings.variant != "auto":
        return "asked for by name"
    if actual.backend == "tensorrt":
        return "the engine's own variant"
    if actual.provider == "tensorrt":
        return "the first that ONNX Runtime's TensorRT provider computes as it is"
    choice = next(
        (choice for provider, choice in manifest.choice.items() if provider == actual.provider),
        None,
    )
    if choice is None:
        return f"{actual.provider} was not there at export, so nothing was chosen for it: the first of a fixed order"
    if choice.variant == actual.variant:
        return f"chosen at export. {choice.reason}"
    return f"export chose {choice.variant} for {actual.provider}, which was passed over"


def _open(
    settings: Settings, bundle: LoadedBundle, certificate: Certificate, provider: str, variant: str
) -> tuple[Runner, TargetCertificate | None]:
    """A runner that one of the two certificates says agrees."""
    if provider == "tensorrt":
        return _open_engine(settings, bundle, certificate, variant)
    reason = runtime.why_unavailable(provider)
    if reason:
        raise UnavailableError(f"{reason}.")
    if variant not in bundle.manifest.models:
        left_out = bundle.manifest.left_out.get(variant)
        reason = f"; it was left out: {left_out}" if left_out else ""
        raise UnavailableError(
            f"the bundle has no such variant, it has {', '.join(sorted(bundle.manifest.models))}{reason}."
        )
    runner = _open_onnx(settings, bundle, provider, variant)
    _require_agreement(certificate, runner.actual)
    return runner, None


def _open_onnx(settings: Settings, bundle: LoadedBundle, provider: str, variant: str) -> Runner:
    num_threads = settings.threads_per_worker()
    if provider == ONNX_TENSORRT:
        profile = read_request(settings.engine).profile
        return runtime.open_onnx_tensorrt(
            bundle, variant, profile, settings.engine_cache, num_threads
        )
    return runtime.open_onnx(
        bundle.model_bytes(variant),
        variant=variant,
        precision=bundle.manifest.models[variant].precision,
        provider=provider,
        num_threads=num_threads,
    )


def _open_engine(
    settings: Settings, bundle: LoadedBundle, certificate: Certificate, variant: str
) -> tuple[Runner, TargetCertificate | None]:
    """The certified engine; or, where it cannot run here, the one that was built here."""
    runner: Runner
    target = None
    try:
        runner = _open_certified_engine(settings, bundle, certificate)
    except (UnavailableError, EngineError) as error:
        if not settings.rebuilt_engine.exists():
            raise
        try:
            runner, target = open_rebuilt(settings.rebuilt_engine, bundle)
        except (UnavailableError, EngineError) as here:
            raise EngineError(f"{error} And the engine that was built here: {here}") from None
        if uncertified := why_uncertified(certificate, runner.actual):
            raise UnavailableError(
                f"the engine that was built here cannot be served: {uncertified}"
            ) from None
    if variant not in ("any", runner.actual.variant):
        raise UnavailableError(
            f"the engine in {settings.engine} is of variant {runner.actual.variant!r}."
        )
    return runner, target


def _open_certified_engine(
    settings: Settings, bundle: LoadedBundle, certificate: Certificate
) -> Runner:
    if certificate.engine_digest is None:
        read_engine_manifest(settings.engine)  # where there is no engine it says so itself
        raise UnavailableError(
            f"the certificate was made without the engine in {settings.engine}; run `dvc repro verify`."
        )
    runner = runtime.open_engine(settings.engine, bundle, certificate.engine_digest)
    _require_agreement(certificate, runner.actual)
    return runner


def _require_agreement(certificate: Certificate, execution: Execution) -> None:
    """UnavailableError unless the certificate has this very execution, and it agrees."""
    for hop in certificate.hops:
        if hop.actual == execution:
            if hop.status == "agrees":
                return
            raise UnavailableError(
                f"the certificate says that {hop.name} {hop.status}: {hop.reason}"
            )
    name = f"{execution.backend}/{execution.provider}/{execution.variant}"
    raise UnavailableError(
        f"the certificate has no executed hop for {name}; run `dvc repro verify` on such a machine."
    )
