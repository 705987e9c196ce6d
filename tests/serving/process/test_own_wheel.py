"""Slipway's wheel, rebuilt from an installation: its files, its bytes, and refusals."""

import base64
import csv
import hashlib
import zipfile
from pathlib import Path

import pytest

from slipway.serving.process.packing import write_own_wheel
from slipway.system.errors import IntegrityError, UnavailableError

INFO = "slipway_ml-0.2.0.dist-info"
OF_THE_WHEEL = {
    "slipway/__init__.py": "code",
    "slipway/assets/launch/torchrun.sh": "#!/bin/sh\n",
    "slipway/serving/page/a, b.html": "<p>",
    f"{INFO}/METADATA": "Metadata-Version: 2.4\nName: slipway-ml\nVersion: 0.2.0\n",
    f"{INFO}/WHEEL": "Tag: py3-none-any\n",
    f"{INFO}/entry_points.txt": "[console_scripts]\n",
    f"{INFO}/licenses/LICENSE": "Apache",
}
OF_THE_INSTALLER = {
    f"{INFO}/INSTALLER": "pip",
    f"{INFO}/direct_url.json": '{"url": "file:///home/somebody"}',
    "../../bin/slipway": "#!/home/somebody/python",
}


def install(site: Path, contents: dict[str, str]) -> Path:
    """Write an installation with its RECORD into `site`; return its package."""
    rows = [[f"{INFO}/RECORD", "", ""], ["slipway/__pycache__/__init__.pyc", "", ""]]
    for name, text in contents.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rows.append([name, f"sha256={digest.rstrip('=')}", str(len(text))])
    with (site / INFO / "RECORD").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return site / "slipway"


@pytest.fixture(name="package")
def _package(tmp_path: Path) -> Path:
    """Return an installed package with an executable launcher."""
    package = install(tmp_path / "lib/site", OF_THE_WHEEL | OF_THE_INSTALLER)
    (package / "assets/launch/torchrun.sh").chmod(0o755)
    return package


def test_own_wheel_contains_the_recorded_files_and_nothing_of_the_installer(
    package: Path, tmp_path: Path
) -> None:
    path = write_own_wheel(tmp_path / "build", package)
    assert path.name == "slipway_ml-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path) as wheel:
        *names, record = wheel.namelist()
        assert record == f"{INFO}/RECORD"
        assert {name: wheel.read(name).decode() for name in names} == OF_THE_WHEEL
        listed = [row[0] for row in csv.reader(wheel.read(record).decode().splitlines())]
        modes = {one.filename: one.external_attr >> 16 for one in wheel.infolist()}
    assert listed == [*names, record]
    assert {name for name, mode in modes.items() if mode & 0o111} == {
        "slipway/assets/launch/torchrun.sh"
    }


def test_own_wheel_is_reproducible_in_another_folder_and_replaces_other_versions(
    package: Path, tmp_path: Path
) -> None:
    other = install(tmp_path / "other", dict(reversed(OF_THE_WHEEL.items())))
    (other / "assets/launch/torchrun.sh").chmod(0o700)
    build = tmp_path / "build"
    build.mkdir()
    (build / "slipway_ml-0.1.0-py3-none-any.whl").touch()
    (build / "other-1.0-py3-none-any.whl").touch()
    first = write_own_wheel(build, package).read_bytes()
    assert write_own_wheel(tmp_path / "second", other).read_bytes() == first
    assert sorted(path.name for path in build.iterdir()) == [
        "other-1.0-py3-none-any.whl",
        "slipway_ml-0.2.0-py3-none-any.whl",
    ]


def test_own_wheel_is_refused_if_an_installed_file_was_changed(
    package: Path, tmp_path: Path
) -> None:
    (package / "__init__.py").write_text("edited")
    with pytest.raises(IntegrityError, match=r"__init__\.py was changed since Slipway was install"):
        write_own_wheel(tmp_path / "build", package)
    (package / "__init__.py").unlink()
    with pytest.raises(IntegrityError, match=r"__init__\.py is missing since"):
        write_own_wheel(tmp_path / "build", package)
    assert not (tmp_path / "build").exists()


def test_own_wheel_is_refused_without_an_installation_or_for_an_editable_one(
    root: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnavailableError, match="which was not installed from a wheel"):
        write_own_wheel(tmp_path / "build", root / "slipway")
    editable = {name: text for name, text in OF_THE_WHEEL.items() if ".dist-info/" in name}
    package = install(tmp_path / "site", editable | {"_slipway_ml.pth": "/home/somebody"})
    with pytest.raises(UnavailableError, match="not in editable mode"):
        write_own_wheel(tmp_path / "build", package)
