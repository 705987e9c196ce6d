"""Removing an extension from the list removes its feature, and nothing else."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slipway.serving.extensions import EXTENSIONS
from tests import plain_http
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.server import Server, copy_service, environment, free_port, running
from tests.structure.core_modules import MOST_CORE_MODULES, num_core_modules

NAMES = tuple(one.name for one in EXTENSIONS)
# The extensions that most others know of, and all, are taken out in every run.
NIGHTLY = [name for name in NAMES if name not in ("monitoring", "rollout")]
CASES = [
    *(pytest.param((name,), id=name, marks=pytest.mark.nightly(seconds=15)) for name in NIGHTLY),
    *(pytest.param((name,), id=name) for name in NAMES if name not in NIGHTLY),
    pytest.param(NAMES, id="all"),
]
PNG = {"content-type": "image/png"}
PATHS = {
    "api_docs": "/docs",
    "explaining": "/explain",
    "monitoring": "/feedback",
    "open_inference": "/v2",
    "page": "/",
    "rollout": "/rollout",
}
STATUS_PARTS = {"monitoring": {"drift", "feedback"}, "rollout": {"rollout"}, "gpu": {"gpu"}}
MODEL_INFO = {"engine_rebuild": "rebuild", "rollout": "rolled_out"}


def service_without(folder: Path, *names: str) -> Path:
    """Return a copy of the service's code without these extensions, in the list and on disk."""
    serving = copy_service(folder)
    path = serving / "extensions.py"
    for name in names:
        text, num_lines = re.subn(
            rf"^(from slipway\.serving\.{name} import .*|    {name}\.EXTENSION,.*)\n",
            "",
            path.read_text(),
            flags=re.MULTILINE,
        )
        assert num_lines == 2
        path.write_text(text)
        shutil.rmtree(serving / name)
    return folder


def require_only_these_gone(server: Server, names: set[str]) -> None:
    """Check that predictions work, and that only the features in `names` are missing."""
    assert (
        plain_http.post(server.url + "/predict", content=picture(), headers=PNG).status_code == 200
    )
    for name, path in PATHS.items():
        status = plain_http.get(server.url + path).status_code
        assert (status == 404) is (name in names), (path, status)
    status = plain_http.get(server.url + "/status").json()
    for name, parts in STATUS_PARTS.items():
        assert (not parts & set(status)) is (name in names), (name, list(status))
    info = plain_http.get(server.url + "/model").json()
    for name, key in MODEL_INFO.items():
        assert (key not in info) is (name in names), (name, list(info))
    metrics = plain_http.get(server.url + "/metrics").text
    assert ("slipway_swaps_total" in metrics) is ("rollout" not in names)
    assert ("slipway_drift_windows_total" in metrics) is ("monitoring" not in names)


@pytest.mark.process
@pytest.mark.parametrize("names", CASES)
def test_removing_an_extension_removes_only_its_feature(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    code, log = service_without(tmp_path / "code", *names), tmp_path / "requests"
    with running(tmp_path, cwd=code, request_log_directory=log, shadow_fraction=0.5) as server:
        server.wait()
        require_only_these_gone(server, set(names))
    assert any(log.rglob("*")) is ("request_log" not in names)


@pytest.mark.process
def test_without_authentication_the_service_listens_on_loopback_only(tmp_path: Path) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    command = [sys.executable, "-m", "bentoml", "serve", "slipway.serving.service:Slipway"]
    command += ["--host", "0.0.0.0", "--port", str(free_port())]
    done = subprocess.run(
        command,
        cwd=service_without(tmp_path / "code", "auth"),
        env=environment(tmp_path, disable_auth="true"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode
    assert "this service has no authentication: use --host 127.0.0.1" in done.stdout + done.stderr


@pytest.mark.process
def test_the_core_of_the_service_stays_small(root: Path) -> None:
    assert 30 < num_core_modules(root) <= MOST_CORE_MODULES
