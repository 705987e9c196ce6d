"""`bentoml build`: what goes into a bento, and that it serves on its own."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `bentoml` is a BENTOML_HOME with a bento; the project that it was built from is gone."""
    folder = tmp_path_factory.mktemp("bento")
    project = folder / "project"
    for name in ("serving", "slipway", "transforms"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", project)
    certify(project / "artifacts/certificate.json", write_bundle(project / "artifacts/bundle"))
    (project / "data").mkdir()
    (project / "data/secret.csv").write_text("not for the bento")
    command = [sys.executable, "-m", "bentoml", "build"]
    done = subprocess.run(command, cwd=project, env=outside_settings(folder), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(project)
    return folder


def outside_settings(folder: Path) -> dict[str, str]:
    """No SLIPWAY_ variable: the bento finds its own files."""
    return {name: value for name, value in environment(folder).items() if not name.startswith("SLIPWAY_")}


@pytest.mark.slow
def test_a_bento_holds_the_service_and_its_model_and_nothing_else(built: Path) -> None:
    (source,) = (built / "bentoml/bentos/slipway").glob("*/src")
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {
        "serving/service.py",
        "serving/index.html",
        "slipway/replay/__main__.py",
        "slipway/reports/console.py",
        "slipway/runtime.py",
        "artifacts/certificate.json",
        "transforms/__init__.py",
    } <= files
    assert {name.split("/")[0] for name in files} == {"serving", "slipway", "transforms", "artifacts", "bentofile.yaml"}
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
