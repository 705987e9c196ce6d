"""`bentoml build`: what goes into a bento, that it serves on its own, and that none is made of what is not certified."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from serving.packing import bento_labels
from slipway.errors import SlipwayError
from slipway.passport import write_engine
from tests.export.small_bundle import passport_for, write_small_bundle
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.server import ROOT, environment, running
from tests.structure.closure import closure, imported_modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["bentoml"]["build"]["python"]["packages"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[=<>!~;\s]", requirement)[0] for requirement in requirements}


def test_a_bento_has_all_of_the_serve_extra() -> None:
    assert names(PROJECT["project"]["optional-dependencies"]["serve"]) <= names(PACKAGES)


def test_a_bento_has_what_ring_0_needs_in_the_service() -> None:
    """Tables and parameters are files between stages, which the service never reads."""
    unused = {"pyarrow", "ruamel-yaml"}
    modules = {"pyarrow", "ruamel", "yaml"}
    assert names(PROJECT["project"]["dependencies"]) - unused <= names(PACKAGES)
    reached = {
        module.split(".")[0] for path in closure(ROOT, [ROOT / "serving/service.py"]) for module in imported_modules(path.read_text())
    }
    assert "numpy" in reached  # the twin: what is imported is seen
    assert not reached & modules


def test_a_bento_has_the_versions_of_the_lock() -> None:
    locked = pins((ROOT / "requirements.lock").read_text())
    locked |= {("onnxruntime", version) for name, version in locked if name == "onnxruntime-gpu"}  # the same release for other machines
    assert {name for name, _ in pins("\n".join(PACKAGES))} == names(PACKAGES)
    assert pins("\n".join(PACKAGES)) <= locked


def pins(text: str) -> set[tuple[str, str]]:
    """(name, version) of every exact requirement."""
    return set(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))


def make_project(project: Path) -> Path:
    """What a bento is built from, with a certified bundle."""
    for name in ("serving", "slipway", "stages", "transforms"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", project)
    certify(project / "artifacts/certificate.json", write_bundle(project / "artifacts/bundle"))
    return project


def build(folder: Path, project: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """`bentoml build` in the project, with a BENTOML_HOME in the folder."""
    command = [sys.executable, "-m", "bentoml", "build"]
    return subprocess.run(command, cwd=project, env=outside_settings(folder) | settings, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `bentoml` is a BENTOML_HOME with a bento; the project that it was built from is gone."""
    folder = tmp_path_factory.mktemp("bento")
    project = make_project(folder / "project")
    (project / "data").mkdir()
    (project / "data/secret.csv").write_text("not for the bento")
    done = build(folder, project)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(project)
    return folder


def outside_settings(folder: Path) -> dict[str, str]:
    """No SLIPWAY_ variable: the bento finds its own files."""
    return {name: value for name, value in environment(folder).items() if not name.startswith("SLIPWAY_")}


def flip_a_byte(path: Path) -> None:
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 1
    path.write_bytes(payload)


def swap_the_engine(root: Path) -> None:
    other = write_small_bundle(root / "other")
    write_engine(root / "artifacts/engine", b"plan", passport_for(other, b"plan"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda root: (root / "artifacts/certificate.json").unlink(), "nothing proves this bundle"),
        (lambda root: certify(root / "artifacts/certificate.json", write_bundle(root / "artifacts/bundle"), status="draft"), "'draft'"),
        (lambda root: certify(root / "artifacts/certificate.json", write_bundle(root / "artifacts/bundle"), status="refused"), "'refused'"),
        (lambda root: write_bundle(root / "artifacts/bundle", max_batch_size=4), "the certificate is for bundle"),
        (lambda root: flip_a_byte(root / "artifacts/bundle/model_fp32.onnx"), "was altered"),
        (lambda root: flip_a_byte(root / "artifacts/certificate.json"), "certificate.json"),
        (lambda root: shutil.rmtree(root / "artifacts/bundle"), "is not a bundle"),
        (swap_the_engine, "the engine is not of bundle"),
    ],
)
def test_what_is_not_certified_is_not_packed(tmp_path: Path, spoil: Callable[[Path], object], reason: str) -> None:
    bundle = write_bundle(tmp_path / "artifacts/bundle")
    certify(tmp_path / "artifacts/certificate.json", bundle)
    assert bento_labels(tmp_path) == {"model_version": bundle.version, "task": "image_classification", "hops_that_agree": "1"}
    spoil(tmp_path)
    with pytest.raises(SlipwayError, match=reason):
        bento_labels(tmp_path)


@pytest.mark.slow
def test_bentoml_build_refuses_a_bundle_without_its_certificate_whatever_the_settings_say(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project")
    elsewhere = (project / "artifacts/certificate.json").rename(tmp_path / "certificate.json")
    done = build(tmp_path, project, SLIPWAY_CERTIFICATE=str(elsewhere))
    assert done.returncode == 1
    assert "no bento is built of what is not certified" in done.stdout + done.stderr
    assert "Run `dvc repro verify`" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not list((tmp_path / "bentoml/bentos").glob("slipway/*"))


@pytest.mark.slow
def test_a_bento_is_labelled_with_its_model(built: Path) -> None:
    (manifest,) = (built / "bentoml/bentos/slipway").glob("*/bento.yaml")
    labels = yaml.safe_load(manifest.read_text())["labels"]
    assert labels["hops_that_agree"] == "1"
    assert len(labels["model_version"]) == 12


@pytest.mark.slow
def test_a_bento_holds_the_service_and_its_model_and_nothing_else(built: Path) -> None:
    (source,) = (built / "bentoml/bentos/slipway").glob("*/src")
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {
        "serving/service.py",
        "serving/index.html",
        "slipway/drift/judging.py",
        "slipway/replay/__main__.py",
        "slipway/reports/console.py",
        "slipway/runtime.py",
        "artifacts/certificate.json",
        "transforms/__init__.py",
    } <= files
    assert {name.split("/")[0] for name in files} == {"serving", "slipway", "stages", "transforms", "artifacts", "bentofile.yaml"}
    assert {name for name in files if name.startswith("stages/")} == {"stages/__init__.py", "stages/compile.py"}
    assert not any(name.startswith(("slipway/data", "slipway/training", "slipway/export")) for name in files)


@pytest.mark.slow
def test_a_bento_serves_from_another_folder_with_its_own_files(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = built / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tests.serving.server.environment", lambda folder, **settings: outside_settings(folder))
    with running(built, "slipway:latest", elsewhere) as server:
        server.wait()
        answer = httpx.post(server.url + "/predict", content=picture(), headers={"content-type": "image/png"})
        assert answer.status_code == 200
        assert list(elsewhere.iterdir()) == []
