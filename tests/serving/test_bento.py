"""`bentoml build`: files of a bento, serving without the project, refused models."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from glob import glob
from pathlib import Path

import jinja2
import pytest
import yaml

from slipway.artifacts.engine_manifest import write_engine
from slipway.kinds.code_digest import reached_files
from slipway.serving.process.packing import bento_labels
from slipway.serving.settings import Settings
from slipway.system.errors import CertificateError, SlipwayError
from slipway.system.version import installed_version
from tests import plain_http
from tests.serving.bundles import (
    certify,
    engine_manifest_for,
    picture,
    write_bundle,
    write_inert_bundle,
)
from tests.serving.server import ROOT, Server, environment, free_port, running
from tests.structure.syntax import imports

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = {
    device: (ROOT / f"launch/requirements.{device}.lock").read_text() for device in ("cpu", "gpu")
}
RUNTIME = {"onnxruntime", "onnxruntime-gpu"}
EXTRAS = PROJECT["project"]["optional-dependencies"]
SERVE = [*EXTRAS["service"], *EXTRAS["serve"]]  # `serve` names `service` as slipway-ml[service]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[=<>!~;\s]", requirement)[0] for requirement in requirements}


@pytest.mark.parametrize("device", LOCKS)
def test_image_lock_has_all_packages_of_the_serve_extra_and_one_runtime(
    device: str,
) -> None:
    locked = {name for name, _ in pins(LOCKS[device])}
    assert names(SERVE) - RUNTIME - {"slipway-ml[service]"} <= locked
    runtime = "onnxruntime-gpu" if device == "gpu" else "onnxruntime"
    assert locked & RUNTIME == {runtime}
    assert any(name.startswith("nvidia-cud") for name in locked) == (device == "gpu")
    blocks = re.findall(r"^[a-z0-9].*\n(?: .*\n)*", LOCKS[device], re.MULTILINE)
    assert len(blocks) == len(pins(LOCKS[device]))
    assert [block for block in blocks if "--hash=sha256:" not in block] == []


@pytest.mark.parametrize(
    ("extra", "shared"), [("grpc", {"numpy", "protobuf"}), ("tracing", {"opentelemetry-sdk"})]
)
def test_lock_of_an_extra_pins_its_packages_to_the_versions_of_the_other_locks(
    extra: str, shared: set[str]
) -> None:
    found = pins((ROOT / f"launch/requirements.{extra}.lock").read_text())
    names_found = {name for name, _ in found}
    assert {name.removesuffix("[grpc]") for name in names(EXTRAS[extra])} <= names_found
    for lock in LOCKS.values():
        both = {pin for pin in pins(lock) if pin[0] in names_found}
        assert both <= found
        assert shared <= {name for name, _ in both}


@pytest.mark.parametrize(
    ("variables", "extras"),
    [
        (None, ""),
        ({"SLIPWAY_GRPC_PORT": "0"}, ""),
        ({"SLIPWAY_GRPC_PORT": 8001}, "grpc"),
        ({"SLIPWAY_TRACING_ENDPOINT": "http://collector:4318/v1/traces"}, "tracing"),
        ({"SLIPWAY_GRPC_PORT": 8001, "SLIPWAY_TRACING_ENDPOINT": "http://x"}, "grpc tracing"),
    ],
)
def test_container_image_contains_the_packages_that_its_settings_need(
    variables: dict[str, str] | None, extras: str
) -> None:
    base = "{% block SETUP_BENTO_COMPONENTS %}{% endblock %}"
    template = (ROOT / "launch/container.j2").read_text()
    loader = jinja2.DictLoader({"base": base, "container": template})
    written = (
        jinja2.Environment(loader=loader)
        .get_template("container")
        .render(bento_base_template="base", __options__env=variables)
    )
    assert re.findall(r'^ARG EXTRAS="(.*)"$', written, re.MULTILINE) == [extras]


def test_locks_of_container_images_omit_packages_that_the_service_does_not_import() -> None:
    """Tables and parameters are files between stages, and the command starts the service."""
    unused = {"pyarrow", "ruamel-yaml"}
    modules = {"pyarrow", "ruamel", "yaml"}
    direct = names([one for one in PROJECT["dependency-groups"]["bento"] if isinstance(one, str)])
    assert names(PROJECT["project"]["dependencies"]) - unused <= direct
    own = names(PROJECT["project"]["dependencies"]) - unused
    assert direct <= names(SERVE) | names(EXTRAS["tokens"]) | own
    assert names(EXTRAS["tokens"]) <= direct  # a model of texts may need its tokenizer
    modules_reached = [
        path
        for path in reached_files(ROOT, [Path("slipway/serving/service.py")])
        if path.suffix == ".py"
    ]
    reached = {
        module.split(".")[0]
        for path in modules_reached
        for module in imports((ROOT / path).read_text())
    }
    assert "numpy" in reached  # the twin: what is imported is seen
    assert not reached & modules


@pytest.mark.parametrize("device", LOCKS)
def test_lock_of_a_container_image_has_the_versions_of_the_project_lock(device: str) -> None:
    """So a bento answers as it was certified. The CUDA libraries come with PyTorch there."""
    project = pins((ROOT / "requirements.lock").read_text())
    assert {one for one in pins(LOCKS[device]) if not one[0].startswith("nvidia-")} <= project


def pins(text: str) -> set[tuple[str, str]]:
    """Return (name, version) of every exact requirement."""
    return set(re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==([\w.]+)", text, re.MULTILINE))


def make_project(project: Path) -> Path:
    """Make a project with a certified bundle, to build a bento from."""
    for name in ("slipway", "transforms"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    (project / "launch").mkdir()
    for path in (
        ROOT / "pyproject.toml",
        ROOT / "launch/container.j2",
        *ROOT.glob("launch/requirements.*.lock"),
    ):
        shutil.copy(path, project / path.relative_to(ROOT))
    certify(project / "artifacts/certificate.json", write_bundle(project / "artifacts/bundle"))
    return project


def build(folder: Path, project: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run `bentoml build` in the project, with a BENTOML_HOME in the folder."""
    command = [sys.executable, "-m", "bentoml", "build"]
    return subprocess.run(
        command,
        cwd=project,
        env=outside_settings(folder) | settings,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a bento, delete its project, and return the folder with its BENTOML_HOME."""
    folder = tmp_path_factory.mktemp("bento")
    project = make_project(folder / "project")
    (project / "data").mkdir()
    (project / "data/secret.csv").write_text("not for the bento")
    done = build(folder, project)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(project)
    return folder


def outside_settings(folder: Path) -> dict[str, str]:
    """Return an environment without SLIPWAY_ variables: the bento finds its own files."""
    return {
        name: value
        for name, value in environment(folder).items()
        if not name.startswith("SLIPWAY_")
    }


def flip_a_byte(path: Path) -> None:
    payload = bytearray(path.read_bytes())
    payload[len(payload) // 2] ^= 1
    path.write_bytes(payload)


def swap_the_engine(root: Path) -> None:
    other = write_inert_bundle(root / "other")
    write_engine(root / "artifacts/engine", b"plan", engine_manifest_for(other, b"plan"))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda root: (root / "artifacts/certificate.json").unlink(), "nothing proves this bundle"),
        (
            lambda root: certify(
                root / "artifacts/certificate.json",
                write_bundle(root / "artifacts/bundle"),
                status="draft",
            ),
            "'draft'",
        ),
        (
            lambda root: certify(
                root / "artifacts/certificate.json",
                write_bundle(root / "artifacts/bundle"),
                status="refused",
            ),
            "'refused'",
        ),
        (
            lambda root: write_bundle(root / "artifacts/bundle", max_batch_size=4),
            "the certificate is for bundle",
        ),
        (lambda root: flip_a_byte(root / "artifacts/bundle/model_fp32.onnx"), "was altered"),
        (lambda root: flip_a_byte(root / "artifacts/certificate.json"), "certificate.json"),
        (lambda root: shutil.rmtree(root / "artifacts/bundle"), "is not a bundle"),
        (swap_the_engine, "the engine is not of bundle"),
    ],
)
def test_bento_build_refuses_an_uncertified_bundle(
    tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    bundle = write_bundle(tmp_path / "artifacts/bundle")
    certify(tmp_path / "artifacts/certificate.json", bundle)
    assert bento_labels(tmp_path) == {
        "model_version": bundle.version,
        "task": "image_classification",
        "slipway": installed_version(),
        "hops_that_agree": "1",
    }
    spoil(tmp_path)
    with pytest.raises(SlipwayError, match=reason):
        bento_labels(tmp_path)


def test_bento_build_refuses_a_bundle_certified_by_another_version_of_slipway(
    tmp_path: Path,
) -> None:
    bundle = write_bundle(tmp_path / "artifacts/bundle")
    certify(tmp_path / "artifacts/certificate.json", bundle, versions={"slipway-ml": "0.0.9"})
    with pytest.raises(CertificateError, match=r"Slipway 0\.0\.9 made the certificate.*Certify"):
        bento_labels(tmp_path)


@pytest.mark.process
def test_bento_build_refuses_a_bundle_without_certificate_under_any_settings(
    tmp_path: Path,
) -> None:
    project = make_project(tmp_path / "project")
    elsewhere = (project / "artifacts/certificate.json").rename(tmp_path / "certificate.json")
    done = build(tmp_path, project, SLIPWAY_CERTIFICATE=str(elsewhere))
    assert done.returncode == 1
    assert "cannot build a bento" in done.stdout + done.stderr
    assert "Run `dvc repro verify`" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not list((tmp_path / "bentoml/bentos").glob("slipway/*"))


@pytest.mark.process
def test_a_bento_is_labelled_with_its_model(built: Path) -> None:
    (manifest,) = (built / "bentoml/bentos/slipway").glob("*/bento.yaml")
    labels = yaml.safe_load(manifest.read_text())["labels"]
    assert labels["hops_that_agree"] == "1"
    assert len(labels["model_version"]) == 12


@pytest.mark.process
def test_bento_contains_only_the_service_and_its_model(built: Path) -> None:
    (source,) = (built / "bentoml/bentos/slipway").glob("*/src")
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {
        "slipway/serving/service.py",
        "slipway/serving/page/index.html",
        "slipway/serving/page/app.js",
        "slipway/serving/page/style.css",
        "slipway/serving/page/zh.json",
        "slipway/drift/verdict.py",
        "slipway/replay/__main__.py",
        "slipway/reports/console.py",
        "slipway/runtimes/runtime.py",
        "artifacts/certificate.json",
        "launch/requirements.cpu.lock",
        "launch/requirements.gpu.lock",
        "launch/requirements.grpc.lock",
        "launch/requirements.tracing.lock",
        "transforms/__init__.py",
    } <= files
    assert {name.split("/")[0] for name in files} == {
        "slipway",
        "transforms",
        "launch",
        "artifacts",
        "bentofile.yaml",
    }
    assert {name for name in files if name.startswith("slipway/stages/")} == {
        "slipway/stages/__init__.py",
        "slipway/stages/compile.py",
    }
    assert not any(
        name.startswith(("slipway/data", "slipway/training", "slipway/export")) for name in files
    )


@pytest.mark.nightly
def test_a_bento_serves_from_another_folder_with_its_own_files(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = built / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(
        "tests.serving.server.environment", lambda folder, **settings: outside_settings(folder)
    )
    with running(built, "slipway:latest", elsewhere) as server:
        server.wait()
        answer = plain_http.post(
            server.url + "/predict", content=picture(), headers={"content-type": "image/png"}
        )
        assert answer.status_code == 200
        assert list(elsewhere.iterdir()) == []


def bento(built: Path) -> Path:
    """Return the folder of the bento, which is a container's build context."""
    (manifest,) = (built / "bentoml/bentos/slipway").glob("*/bento.yaml")
    return manifest.parent


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Return (INSTRUCTION, arguments) of a Dockerfile, in order."""
    joined = re.sub(r"\\\n\s*", " ", dockerfile)
    return re.findall(r"^([A-Z]+) +(.+)$", joined, re.MULTILINE)


def last(found: list[tuple[str, str]], instruction: str) -> str:
    return next(arguments for name, arguments in reversed(found) if name == instruction)


@pytest.mark.process
def test_container_runs_without_root_and_has_a_health_check_and_a_writable_state(
    built: Path,
) -> None:
    found = instructions((bento(built) / "env/docker/Dockerfile").read_text())
    assert last(found, "USER") == "bentoml"
    assert [name for name, _ in found].index("HEALTHCHECK") > [name for name, _ in found].index(
        "ENTRYPOINT"
    )
    url = re.search(
        r"CMD curl .*http://127\.0\.0\.1:\$\{BENTOML_PORT:-3000\}(/\w+)", last(found, "HEALTHCHECK")
    )
    assert url
    assert url[1] == "/livez"
    assert any(
        name == "RUN" and arguments.endswith("chown bentoml:bentoml /var/lib/slipway")
        for name, arguments in found
    )
    environment = {
        arguments.split("=")[0].split(" ")[0] for name, arguments in found if name in ("ENV", "ARG")
    }
    assert {"BENTOML_HOST", "BENTOML_DO_NOT_TRACK", "SLIPWAY_STATE"} <= environment
    assert any(
        "curl" in arguments for name, arguments in found if name == "RUN"
    )  # which the health check needs


@pytest.mark.process
def test_bento_contains_every_file_that_its_container_copies(built: Path) -> None:
    """The container is not built here: files that it copies and runs have to exist."""
    context = bento(built)
    found = instructions((context / "env/docker/Dockerfile").read_text())
    copied = [arguments.split()[-2] for name, arguments in found if name == "COPY"]
    assert "./src/*/requirements.*.lock" in copied
    assert [source for source in copied if not glob(source, root_dir=context)] == []
    entrypoint = re.search(r"/home/bentoml/bento/(\S+)\"", last(found, "ENTRYPOINT"))
    assert entrypoint
    assert (context / entrypoint[1]).is_file()
    settings = {
        arguments.split("=")[0]
        for name, arguments in found
        if name == "ARG" and arguments.startswith("SLIPWAY_")
    }
    assert settings <= {f"SLIPWAY_{name.upper()}" for name in Settings.model_fields}


@pytest.mark.process
def test_container_image_pins_its_base_lacks_compilers_and_installs_by_hashes(
    built: Path,
) -> None:
    dockerfile = (bento(built) / "env/docker/Dockerfile").read_text()
    found = instructions(dockerfile)
    assert [arguments for name, arguments in found if name == "FROM"] == [
        "${BASE_IMAGE} AS base-container"
    ]
    assert not re.search(r"build-essential|\bg?cc\b|g\+\+|\bmake\b", dockerfile)
    install, further, own = (arguments for name, arguments in found if "pip install" in arguments)
    for one in (install, further):
        assert "--require-hashes" in one
        assert "--only-binary :all:" in one
    assert "--no-deps --no-index" in own  # Slipway itself, which the bento has with it
    check = next(arguments for name, arguments in found if name == "RUN")
    for image, code in (("python:3.12-slim", 1), ("python:3.12-slim@sha256:ab12", 0)):
        done = subprocess.run(
            ["sh", "-c", check], env={"BASE_IMAGE": image}, capture_output=True, text=True
        )
        assert done.returncode == code
        assert ("which has no digest" in done.stderr) == bool(code)


def serves(
    bento: Path, folder: Path, python: Path, *, under: tuple[str, ...] = (), **variables: str
) -> None:
    """Serve a bento with only `python`, from an empty folder, and send one request."""
    elsewhere, port, log = folder / "empty", free_port(), folder / "served.log"
    elsewhere.mkdir(exist_ok=True)
    outside = {"PATH": f"{python.parent}:/usr/bin:/bin", "BENTOML_DO_NOT_TRACK": "True"}
    command = [*under, str(python), "-m", "bentoml", "serve", str(bento), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=elsewhere, env=outside | variables, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        server = Server(process, f"http://127.0.0.1:{port}", log)
        server.wait(seconds=60)
        answer = plain_http.post(
            server.url + "/predict", content=picture(), headers={"content-type": "image/png"}
        )
        assert answer.status_code == 200, answer.text
        assert list(elsewhere.iterdir()) == []
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


READ_ONLY = """
mount --make-rprivate / && mount -o remount,bind,ro / || exit 77
for folder in "$TMPDIR" "$SLIPWAY_STATE"; do mount -t tmpfs tmpfs "$folder" || exit 77; done
exec "$@"
"""  # in a mount namespace of its own, which ends with the process


@pytest.mark.process
def test_a_bento_serves_on_a_read_only_file_system_except_state_and_tmp(built: Path) -> None:
    """Restrict a process as a container with a read-only root does."""
    writable = {"TMPDIR": built / "tmp", "SLIPWAY_STATE": built / "state"}
    for folder in writable.values():
        folder.mkdir()
    variables = {name: str(folder) for name, folder in writable.items()} | {
        "BENTOML_HOME": f"{built / 'tmp/bentoml'}"
    }
    under = ("unshare", "--mount", "sh", "-c", READ_ONLY, "sh")
    tried = subprocess.run(
        [*under, "touch", built / "x"], env=os.environ | variables, capture_output=True, text=True
    )
    if "Read-only file system" not in tried.stderr:  # the twin as well: it may not write there
        pytest.skip(f"no read-only mounts here: {tried.stderr.strip()}")
    serves(bento(built), built, Path(sys.executable), under=under, **variables)
    assert "Read-only file system" not in (built / "served.log").read_text()
    assert list(writable["SLIPWAY_STATE"].iterdir()) == []  # it was the namespace's


@pytest.mark.nightly
def test_a_bento_serves_with_only_its_own_requirements(built: Path) -> None:
    """Uses an environment made of the bento's requirements, like its container."""
    environment = built / "environment"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    python = environment / "bin/python"
    requirements = bento(built) / "src/launch/requirements.cpu.lock"
    install = [*uv, "pip", "install", "--quiet", "--no-config", "--require-hashes"]
    subprocess.run(
        [*install, "--only-binary", ":all:", "--python", python, "--requirement", requirements],
        check=True,
        timeout=900,
    )
    missing = subprocess.run([python, "-c", "import torch"], capture_output=True)
    assert missing.returncode != 0  # the twin: it is not the environment of the tests
    serves(bento(built), built, python, BENTOML_HOME=str(built / "other"))
