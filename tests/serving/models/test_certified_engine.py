"""A TensorRT engine is served only if it is the certified one."""

from pathlib import Path

import pytest

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.artifacts.certificate import Execution
from slipway.artifacts.engine_manifest import (
    EngineManifest,
    Profile,
    read_engine_manifest,
    read_plan,
    write_engine,
)
from slipway.runtimes import engine_runner, runtime
from slipway.runtimes.runtime import Runner
from slipway.serving.models.loader import load_model
from slipway.system import files
from slipway.system.errors import (
    IntegrityError,
    UnavailableError,
)
from tests.serving.bundles import (
    MACHINE,
    certify,
    hop,
)
from tests.serving.conftest import MakeSettings
from tests.serving.models.damage import flip_a_byte

ENGINE_FP32 = Execution(backend="tensorrt", provider="tensorrt", precision="fp32", variant="fp32")


class CertifiedEngine:
    """An engine in `root`/engine with real files, run by ONNX Runtime because there is no GPU."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.bundle = root, load_bundle(root / "bundle")
        self.write(b"an engine")
        self.certify(files.sha256_file(root / "engine/engine_manifest.json"))
        monkeypatch.setattr(engine_runner, "open_engine", self._open)

    def write(self, plan: bytes) -> None:
        manifest = self.bundle.manifest
        engine_manifest = EngineManifest(
            format_version=2,
            engine_sha256=files.sha256_bytes(plan),
            model_sha256=manifest.models["fp32"].sha256,
            bundle_digest=self.bundle.digest,
            profile=Profile(smallest=1, optimal=1, largest=manifest.max_batch_size),
            workspace_mib=256,
            machine=MACHINE,
            requested=ENGINE_FP32,
            actual=ENGINE_FP32,
            precision_read_from="engine",
        )
        write_engine(self.root / "engine", plan, engine_manifest)

    def certify(self, engine_digest: str | None) -> None:
        engine_hop = hop().model_copy(
            update={"name": "tensorrt/fp32", "requested": ENGINE_FP32, "actual": ENGINE_FP32}
        )
        certify(
            self.root / "certificate.json",
            self.bundle,
            [hop(), engine_hop],
            engine_digest=engine_digest,
        )

    def _open(self, root: Path, bundle: LoadedBundle, certified: str | None = None) -> Runner:
        read_plan(root, read_engine_manifest(root, certified))
        runner = runtime.open_onnx(
            bundle.model_bytes("fp32"),
            variant="fp32",
            precision="fp32",
            provider="cpu",
            num_threads=1,
        )
        runner.actual = ENGINE_FP32
        return runner


@pytest.fixture
def engine(certified: Path, monkeypatch: pytest.MonkeyPatch) -> CertifiedEngine:
    return CertifiedEngine(certified, monkeypatch)


def test_the_certified_engine_is_served(
    engine: CertifiedEngine, make_settings: MakeSettings
) -> None:
    assert load_model(make_settings()).selection.actual == ENGINE_FP32


@pytest.mark.parametrize("provider", ["auto", "tensorrt"])
def test_engine_replaced_after_certification_is_refused_even_if_the_provider_is_auto(
    engine: CertifiedEngine, make_settings: MakeSettings, provider: str
) -> None:
    engine.write(b"another engine of the same graph")
    with pytest.raises(IntegrityError, match="is not the certified one"):
        load_model(make_settings(provider=provider))


def test_engine_with_a_flipped_bit_is_refused_even_if_the_provider_is_auto(
    engine: CertifiedEngine, certified: Path, make_settings: MakeSettings
) -> None:
    flip_a_byte(certified / "engine/engine.plan")
    with pytest.raises(IntegrityError, match="was altered"):
        load_model(make_settings())


def test_engine_that_the_certificate_does_not_cover_is_not_served(
    engine: CertifiedEngine, make_settings: MakeSettings
) -> None:
    engine.certify(None)
    with pytest.raises(UnavailableError, match="the certificate does not cover the engine"):
        load_model(make_settings(provider="tensorrt"))
    assert load_model(make_settings()).selection.actual.provider == "cpu"
