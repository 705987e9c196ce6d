"""Wheel and sdist: the same bytes from the same files, and all that a project elsewhere needs."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from slipway.system import files
from tests.conftest import ROOT
from tests.structure.tracked import tracked_files

pytestmark = pytest.mark.process


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders with wheel and sdist, of two copies of the checkout with other times and modes.

    Beside the tracked files, the second has keys and bytecode.
    """
    found = []
    for name, mask, time in (("first", 0o022, 1_700_000_000), ("second", 0o077, 1_800_000_000)):
        copy = tmp_path_factory.mktemp(name)
        for path in tracked_files(ROOT, ("",)):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy / path)
            os.utime(copy / path, (time, time))
            (copy / path).chmod((copy / path).stat().st_mode & ~mask)
        for link in ("serving", "stages"):
            (copy / link).symlink_to((ROOT / link).readlink())
        if name == "second":
            for path in ("launch/secrets/keys", "slipway/system/__pycache__/files.pyc"):
                (copy / path).parent.mkdir(parents=True)
                (copy / path).write_text("not for others")
        command = [sys.executable, "-m", "hatchling", "build", "--directory", f"{copy}/dist"]
        subprocess.run(command, cwd=copy, check=True, capture_output=True, umask=mask)
        found.append(copy / "dist")
    return found


def test_two_builds_of_the_same_files_are_equal_to_the_byte(built: list[Path]) -> None:
    digests = [
        {path.name: files.sha256_file(path) for path in folder.iterdir()} for folder in built
    ]
    assert digests[0] == digests[1]
    endings = sorted("".join(Path(name).suffixes[-1:]) for name in digests[0])
    assert endings == [".gz", ".whl"]


def test_the_wheel_holds_the_code_its_files_and_what_projects_use_and_nothing_else(
    root: Path, built: list[Path]
) -> None:
    (wheel,) = built[1].glob("slipway_ml-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        modes = {one.filename: one.external_attr >> 16 for one in archive.infolist()}
        (metadata,) = (name for name in names if name.endswith("dist-info/METADATA"))
        headers = message_from_bytes(archive.read(metadata))
    tracked = tracked_files(root, ("",))
    own = {path for path in tracked if path.startswith("slipway/")}
    beside = {
        path
        for path in tracked
        if (path.startswith(("launch/", "monitoring/", "data/demo/")) and not path.endswith(".py"))
        or path in ("dvc.yaml", "params.yaml")
    }
    assert {"slipway/stages/train.py", "slipway/serving/page/index.html"} <= own
    assert {"launch/requirements.cpu.lock", "data/demo/wine.csv", "dvc.yaml"} <= beside
    assert any(path.startswith("monitoring/grafana/") and "json" in path for path in beside)
    assert {name for name in names if ".dist-info/" not in name} == own | {
        f"slipway/assets/{path}" for path in beside
    }
    assert modes["slipway/assets/launch/torchrun.sh"] & 0o100
    assert headers["Name"] == "slipway-ml"


def test_the_sdist_builds_the_same_wheel_and_holds_no_keys(
    built: list[Path], tmp_path: Path
) -> None:
    (sdist,), (wheel,) = (built[1].glob(f"*{ending}") for ending in (".tar.gz", ".whl"))
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    assert not [name for name in names if "secrets" in name or "__pycache__" in name]
    (folder,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run([*command, "--directory", tmp_path], cwd=folder, check=True, capture_output=True)
    assert files.sha256_file(tmp_path / wheel.name) == files.sha256_file(wheel)
