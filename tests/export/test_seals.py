"""One flipped bit in a bundle, an engine or a certificate, in any of their files, and the service refuses."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from slipway import files
from slipway.bundle import load_bundle
from slipway.certificate import Execution, check_certificate, read_certificate, write_certificate
from slipway.errors import BundleError, CertificateError, SlipwayError
from slipway.export.certification import make_certificate
from slipway.export.comparison import failed
from slipway.passport import PASSPORT, Profile, check_origin, read_passport, read_plan, write_engine
from tests.export.conftest import Project
from tests.export.small_bundle import passport_for

pytestmark = pytest.mark.slow
FP32 = Execution(backend="onnxruntime", provider="cpu", precision="fp32", variant="fp32")
PLAN = bytes(range(256))


@pytest.fixture
def sealed(classifier: Project, tmp_path: Path) -> Path:
    """A bundle, an engine of one of its graphs and the certificate of both, as verify leaves them."""
    shutil.copytree(classifier.bundle_root, tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    write_engine(tmp_path / "engine", PLAN, passport_for(bundle, PLAN, profile=Profile(smallest=1, optimal=8, largest=32)))
    hops = [failed(name, FP32, "").model_copy(update={"status": "agrees"}) for name in ("torch", "onnxruntime/cpu/fp32", "http")]
    engine_digest = files.sha256_file(tmp_path / "engine" / PASSPORT)
    write_certificate(tmp_path / "certificate.json", make_certificate(bundle, hops, {}, engine_digest=engine_digest, draft=False))
    return tmp_path


def accept(root: Path) -> None:
    """What a service does before it loads anything."""
    bundle = load_bundle(root / "bundle")
    bundle.verify()
    certificate = read_certificate(root / "certificate.json")
    check_certificate(certificate, bundle, accept_draft=False)
    passport = read_passport(root / "engine", certificate.engine_digest)
    check_origin(passport, bundle)
    read_plan(root / "engine", passport)


PARTS = [
    "bundle/bundle.json",
    "bundle/model_fp32.onnx",
    "bundle/canary.npz",
    "certificate.json",
    "engine/passport.json",
    "engine/engine.plan",
]


@pytest.mark.parametrize("part", PARTS)
def test_a_thousand_flipped_bits_are_all_refused_and_the_healthy_file_is_not(sealed: Path, part: str) -> None:
    accept(sealed)
    original = (sealed / part).read_bytes()
    places = np.random.default_rng(0).integers((len(original), 8), size=(1000, 2))
    accepted = []
    for byte, bit in places.tolist():
        payload = bytearray(original)
        payload[byte] ^= 1 << bit
        (sealed / part).write_bytes(payload)
        try:
            accept(sealed)
            accepted.append((byte, bit))
        except SlipwayError:
            pass
    assert accepted == []
    (sealed / part).write_bytes(original)
    accept(sealed)


def test_every_model_of_a_bundle_is_checked_even_those_that_do_not_run(sealed: Path) -> None:
    for path in sorted((sealed / "bundle").glob("*.onnx")):
        original = path.read_bytes()
        path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        with pytest.raises(BundleError, match=f"{path.name} was altered"):
            accept(sealed)
        path.write_bytes(original)


@pytest.mark.parametrize(
    ("written", "altered"), [('"latency_ms": null', '"latency_ms": 0.1'), ('"rows": 0', '"rows": -0'), ("\n}", "\n }"), ("}", "} ")]
)
def test_an_edited_certificate_is_refused_even_where_its_json_means_the_same(sealed: Path, written: str, altered: str) -> None:
    path = sealed / "certificate.json"
    text = path.read_text()
    assert written in text
    path.write_text(text.replace(written, altered, 1))
    with pytest.raises(CertificateError, match="was altered"):
        read_certificate(path)


@pytest.mark.parametrize("odd", ['"\\ud800"', "NaN", "[[[1]]]"])
def test_what_json_alone_takes_is_no_certificate(sealed: Path, odd: str) -> None:
    path = sealed / "certificate.json"
    path.write_text(path.read_text().replace('"draft"', odd).replace('"certified"', odd))
    with pytest.raises(CertificateError, match="was altered"):
        read_certificate(path)
