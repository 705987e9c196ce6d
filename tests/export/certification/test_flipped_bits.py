"""The service refuses every flipped bit in a bundle, an engine or a certificate."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.certificate import REQUIRED, Execution, read_certificate, write_certificate
from slipway.artifacts.engine_manifest import ENGINE_MANIFEST, Profile, write_engine
from slipway.export.certification.comparison import failed
from slipway.export.certification.verdict import make_certificate
from slipway.runtimes import memfd
from slipway.runtimes.runtime import open_onnx
from slipway.serving.models.loader import load_model
from slipway.serving.models.model import ServedModel
from slipway.system import files
from slipway.system.errors import BundleError, CertificateError, SlipwayError
from tests.export.conftest import Project
from tests.serving.bundles import engine_manifest_for
from tests.serving.in_process import read_all_settings

pytestmark = pytest.mark.process
FP32 = Execution(backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32")
PLAN = bytes(range(256))
GRAPHS = {f"model_{variant}.onnx" for variant in ("fp32", "fp16", "int8", "int8_tensorrt")}


@pytest.fixture
def sealed(classifier: Project, tmp_path: Path) -> Path:
    """Return a folder with a bundle, an engine and their certificate, as `verify` writes them."""
    shutil.copytree(classifier.bundle_root, tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    write_engine(
        tmp_path / "engine",
        PLAN,
        engine_manifest_for(bundle, PLAN, profile=Profile(smallest=1, optimal=8, largest=32)),
    )
    hops = [
        failed(name, FP32, "", actual=FP32).model_copy(update={"status": "agrees"})
        for name in REQUIRED
    ]
    engine_digest = files.sha256_file(tmp_path / "engine" / ENGINE_MANIFEST)
    write_certificate(
        tmp_path / "certificate.json",
        make_certificate(bundle, hops, {}, [], engine_digest=engine_digest, draft=False),
    )
    return tmp_path


def accept(root: Path) -> ServedModel:
    """Load the files as the service does at its start."""
    places = {
        "bundle": root / "bundle",
        "certificate": root / "certificate.json",
        "engine": root / "engine",
    }
    return load_model(
        read_all_settings({f"SLIPWAY_{name.upper()}": str(path) for name, path in places.items()})
    )


def flip(path: Path, bit: int) -> None:
    payload = bytearray(path.read_bytes())
    payload[bit // 8] ^= 1 << bit % 8
    path.write_bytes(payload)


def test_each_of_a_thousand_flipped_bits_is_refused(
    sealed: Path,
) -> None:
    assert accept(sealed).version
    generator, paths = (
        np.random.default_rng(0),
        sorted(path for path in sealed.rglob("*") if path.is_file()),
    )
    assert {path.name for path in paths} == {
        "bundle.json",
        "certificate.json",
        "engine_manifest.json",
        "engine.plan",
        "golden_rows.npz",
        "drift.json",
        *GRAPHS,
    }
    accepted, flipped = [], set()
    for number in range(1000):
        path = paths[number % len(paths)]
        bit = int(generator.integers(path.stat().st_size * 8))
        flip(path, bit)
        try:
            accept(sealed)
            accepted.append((path.name, bit))
        except SlipwayError:
            flipped.add((path.name, bit))
        flip(path, bit)
    assert accepted == []
    assert len(flipped) > 900  # hardly any bit was drawn twice
    assert accept(sealed).version


def test_a_flipped_bit_in_a_label_is_refused_in_every_file(sealed: Path) -> None:
    path = sealed / "bundle/bundle.json"
    place = path.read_bytes().index(b"amber")
    for bit in range(place * 8, (place + len(b"amber")) * 8):
        flip(path, bit)
        with pytest.raises(SlipwayError):
            accept(sealed)
        flip(path, bit)
    assert accept(sealed).version


def test_an_altered_variant_is_refused_even_if_another_one_runs(sealed: Path) -> None:
    for path in sorted((sealed / "bundle").glob("*.onnx")):
        original = path.read_bytes()
        path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        with pytest.raises(BundleError, match=f"{path.name} was altered"):
            accept(sealed)
        path.write_bytes(original)


@pytest.mark.parametrize(
    ("written", "altered"),
    [
        ('"latency_ms": null', '"latency_ms": 0.1'),
        ('"rows": 0', '"rows": -0'),
        ("\n}", "\n }"),
        ("}", "} "),
    ],
)
def test_certificate_reformatted_without_changing_its_json_is_refused(
    sealed: Path, written: str, altered: str
) -> None:
    path = sealed / "certificate.json"
    text = path.read_text()
    assert written in text
    path.write_text(text.replace(written, altered, 1))
    with pytest.raises(CertificateError, match="was altered"):
        read_certificate(path)


@pytest.mark.parametrize("odd", ['"\\ud800"', "NaN", "[[[1]]]"])
def test_certificate_with_json_extensions_such_as_nan_is_invalid(sealed: Path, odd: str) -> None:
    path = sealed / "certificate.json"
    path.write_text(path.read_text().replace('"draft"', odd).replace('"certified"', odd))
    with pytest.raises(CertificateError, match="was altered"):
        read_certificate(path)


@pytest.mark.parametrize("small", [memfd.SMALL, 0])
def test_a_graph_with_external_weights_is_refused_even_with_a_matching_digest(
    sealed: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """No digest covers files beside a model; a graph loaded from bytes reads none of them."""
    monkeypatch.setattr(memfd, "SMALL", small)
    path = sealed / "bundle/model_fp32.onnx"
    graph = path.read_bytes()
    onnx.save_model(
        onnx.load_model_from_string(graph),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
        convert_attribute=False,
    )
    assert (sealed / "bundle/weights.bin").exists()
    content = json.loads((sealed / "bundle/bundle.json").read_text())
    content["models"]["fp32"]["sha256"] = files.sha256_file(path)
    files.write_json(sealed / "bundle/bundle.json", content)
    outside = load_bundle(sealed / "bundle").model_bytes("fp32")
    with pytest.raises(BundleError, match="cannot load the fp32 graph"):
        open_onnx(outside, variant="fp32", precision="fp32", provider="cpu", num_threads=1)
    assert open_onnx(graph, variant="fp32", precision="fp32", provider="cpu", num_threads=1)
