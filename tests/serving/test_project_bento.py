"""`bentoml build` and `bentoml serve` in projects, with Slipway installed from its wheel."""

import io
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slipway.inputs.images import TransformContract, array_from_bytes
from slipway.inputs.user_function import code_digest
from slipway.project.creation import create
from slipway.project.inspection import inspect
from slipway.project.proposal import propose
from slipway.serving.process.packing import write_build_files
from slipway.system.errors import UnavailableError
from tests import plain_http
from tests.installed import build_wheel, install_wheel, outside_the_checkout
from tests.project.shapes import embedded_digits, wine_parquet
from tests.serving.bundles import (
    CONTRACT,
    ROW,
    certify,
    picture,
    probabilities,
    row_classifier,
    write_bundle,
)
from tests.serving.server import ROOT, Server, free_port

BENTOML = Path(sys.executable).with_name("bentoml")  # a script: no folder of its own on sys.path
INVERT = """
from helpers.light import LIGHTEST

def invert(image):
    return image.point(lambda value: LIGHTEST - value)
"""


@pytest.fixture(name="wheel", scope="module")
def _wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(name="python", scope="module")
def _python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Return the Python of an environment in which Slipway's wheel is installed."""
    return install_wheel(wheel, tmp_path_factory.mktemp("installed") / "environment")


@pytest.fixture(autouse=True)
def _outside_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))


def images_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a project with a certified image classifier and a user transform that inverts images."""
    create(folder, propose(inspect(embedded_digits(folder.parent))))
    (folder / "faces.py").write_text(INVERT)
    (folder / "helpers").mkdir()
    (folder / "helpers/__init__.py").touch()
    (folder / "helpers/light.py").write_text("LIGHTEST = 255\n")
    monkeypatch.syspath_prepend(folder)
    transform = TransformContract(function="faces:invert", sha256=code_digest("faces:invert"))
    contract = CONTRACT.model_copy(update={"transform": transform})
    bundle = write_bundle(folder / "artifacts/bundle", input=contract)
    certify(folder / "artifacts/certificate.json", bundle)
    return folder


def table_project(folder: Path) -> Path:
    """Make a project with a certified classifier of table rows."""
    create(folder, propose(inspect(wine_parquet(folder.parent))))
    bundle = write_bundle(folder / "artifacts/bundle", row_classifier())
    certify(folder / "artifacts/certificate.json", bundle)
    return folder


def build(project: Path, home: Path, python: Path) -> subprocess.CompletedProcess[str]:
    """Run `bentoml build` in the project, as the environment's script would."""
    return subprocess.run(
        [python, BENTOML, "build"],
        cwd=project,
        env=outside_the_checkout(home, python),
        capture_output=True,
        text=True,
        timeout=120,
    )


@contextmanager
def serving(target: Path, home: Path, python: Path) -> Iterator[Server]:
    """Serve a bento, or a project, in that environment, and wait until it is ready."""
    port, log = free_port(), home / f"{target.name}.log"
    command = [str(python), str(BENTOML), "serve", str(target), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=target,
            env=outside_the_checkout(home, python),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        server = Server(process, f"http://127.0.0.1:{port}", log)
        server.wait(seconds=60)
        yield server
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def inverted_probabilities(payload: bytes) -> list[float]:
    """Return the right prediction of `images_project` for an image."""
    with Image.open(io.BytesIO(payload)) as image:
        png = io.BytesIO()
        Image.fromarray(255 - np.asarray(image)).save(png, "PNG")
    expected: list[float] = probabilities(array_from_bytes(png.getvalue(), CONTRACT)[None])[
        0
    ].tolist()
    return expected


def check_answer(server: Server) -> None:
    """Check one prediction of the service of `images_project`."""
    payload = picture(3)
    answer = plain_http.post(
        server.url + "/predict", content=payload, headers={"content-type": "image/png"}
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()["probabilities"]
    assert list(found.values()) == pytest.approx(inverted_probabilities(payload), abs=1e-3)


@pytest.mark.nightly(seconds=60)
def test_bento_of_a_project_serves_without_the_project_and_the_checkout(
    tmp_path: Path, wheel: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes along our wheel, the image's locks and the user's own modules, and no data."""
    project = images_project(tmp_path / "My photographs", monkeypatch)
    (project / "data").mkdir(exist_ok=True)
    for name in ("data/private.csv", ".work/draft.py", "venv/lib/site-packages/x.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("not for the bento")
    done = build(project, tmp_path, python)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(project)
    (manifest,) = (tmp_path / "bentoml/bentos/my_photographs").glob("*/bento.yaml")
    bento = manifest.parent
    source = bento / "src"
    packed = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert packed == {
        "artifacts/bundle/bundle.json",
        "artifacts/bundle/model_fp32.onnx",
        "artifacts/certificate.json",
        "bentofile.yaml",
        f"build/{wheel.name}",
        "build/requirements.cpu.lock",
        "build/requirements.gpu.lock",
        "build/requirements.grpc.lock",
        "build/requirements.postgres.lock",
        "build/requirements.tracing.lock",
        "faces.py",
        "helpers/__init__.py",
        "helpers/light.py",
    }
    own = source / "build" / wheel.name
    assert contents(own) == contents(wheel)
    dockerfile = (bento / "env/docker/Dockerfile").read_text()
    (lock,) = re.findall(r"^COPY (\S+) /tmp/$", dockerfile, re.MULTILINE)
    assert {path.name for path in bento.glob(lock)} == {
        f"requirements.{name}.lock" for name in ("cpu", "gpu", "grpc", "tracing", "postgres")
    }
    assert "src/build/slipway_ml-*.whl" in dockerfile
    there = install_wheel(own, tmp_path / "there")
    with serving(bento, tmp_path, there) as server:
        check_answer(server)


def contents(wheel: Path) -> dict[str, bytes]:
    """Return the files of a wheel by name, without RECORD, whose rows have no fixed order."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: archive.read(name) for name in names}


@pytest.mark.nightly(seconds=40)
def test_two_projects_in_one_environment_have_separate_params_artifacts_and_services(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = images_project(tmp_path / "images", monkeypatch)
    table = table_project(tmp_path / "table")
    read = "from slipway.config.params import load_params; print(load_params().data.task)"
    for project, task in ((images, "image_classification"), (table, "table_classification")):
        answer = subprocess.run(
            [python, "-c", read],
            cwd=project,
            env=outside_the_checkout(tmp_path, python),
            capture_output=True,
            text=True,
        )
        assert answer.stdout.strip() == task, answer.stderr
    with (
        serving(images, tmp_path, python) as one,
        serving(table, tmp_path, python) as two,
    ):
        check_answer(one)
        of_a_row = plain_http.post(two.url + "/predict", json=ROW)
        assert of_a_row.status_code == 200, of_a_row.text
        found = [plain_http.get(server.url + "/model").json()["task"] for server in (one, two)]
    assert found == ["image_classification", "table_classification"]


@pytest.mark.process
def test_project_bento_is_refused_for_an_uncertified_model_or_changed_code(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = images_project(tmp_path / "project", monkeypatch)
    (project / "faces.py").write_text(INVERT.replace("LIGHTEST - ", "LIGHTEST + "))
    changed = build(project, tmp_path, python)
    assert "cannot build a bento: the code of faces:invert has the SHA-256" in changed.stderr
    (project / "artifacts/certificate.json").unlink()
    uncertified = build(project, tmp_path, python)
    assert "nothing proves this bundle" in uncertified.stderr
    assert [changed.returncode, uncertified.returncode] == [1, 1]
    assert "Traceback" not in changed.stderr + uncertified.stderr
    assert not (tmp_path / "bentoml/bentos/project").exists()
    assert not (project / "build").exists()


@pytest.mark.unit
def test_bento_contains_the_clones_code_or_the_projects_installed_package(
    tmp_path: Path,
) -> None:
    write_build_files(ROOT)
    assert not (ROOT / "build").exists()
    with pytest.raises(UnavailableError, match="was not installed from a wheel"):
        write_build_files(tmp_path)
