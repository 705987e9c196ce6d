"""Remote data through DVC: imported, pushed, and pulled into a fresh clone.

The remote is a folder on this machine.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from slipway.system import files
from tests.end_to_end.project import Project, copy_checkout, draw_shapes

pytestmark = pytest.mark.process


def clone(origin: Project, target: Path) -> Project:
    subprocess.run(["git", "clone", "--quiet", str(origin.path), str(target)], check=True)
    (target / ".venv").symlink_to(sys.prefix)
    (target / ".work" / "home").mkdir(parents=True)
    return Project(target)


def configure(project: Project, data_path: str) -> None:
    # Few pictures: exact shares put every class into every split.
    project.set_params({"data": {"path": data_path}, "split": {"assignment": "exact"}})
    project.set_value("clean.rules.near_duplicate", None)  # see conftest.py


def results(project: Project) -> dict[str, str]:
    folders = [project.path / "data" / name for name in ("clean", "split")]
    return {
        path.relative_to(project.path).as_posix(): files.sha256_file(path)
        for folder in folders
        for path in sorted(folder.iterdir())
    }


def kept(project: Project) -> int:
    report: dict[str, Any] = json.loads((project.path / "reports/clean.json").read_text())
    return int(report["kept"])


@pytest.mark.nightly(seconds=40)
def test_an_imported_archive_can_be_pushed_pulled_and_updated(tmp_path: Path) -> None:
    elsewhere, remote = tmp_path / "elsewhere", tmp_path / "remote"
    draw_shapes(elsewhere / "shapes")
    shutil.make_archive(str(elsewhere / "shapes"), "zip", elsewhere / "shapes")
    (tmp_path / "first").mkdir()
    first = copy_checkout(tmp_path / "first")
    configure(first, "data/shapes.zip")
    first.shell(f"dvc import-url {elsewhere}/shapes.zip data/shapes.zip")
    first.shell(f"dvc remote add --default store {remote}")
    first.shell(
        "dvc repro split && git add -A && git commit -qm 'Shapes from elsewhere' && dvc push"
    )
    assert kept(first) == 64

    # A fresh clone has neither the source nor the first one's cache.
    (elsewhere / "shapes.zip").rename(elsewhere / "gone.zip")
    shutil.rmtree(first.path / ".dvc" / "cache")
    second = clone(first, tmp_path / "second")
    assert not (second.path / "data/shapes.zip").exists()
    second.shell("dvc pull data/shapes.zip.dvc")
    assert files.sha256_file(second.path / "data/shapes.zip") == files.sha256_file(
        elsewhere / "gone.zip"
    )
    second.shell("dvc pull clean split")
    assert "Stage 'clean' didn't change, skipping" in second.shell("dvc repro split")
    assert results(second) == results(first)
    shutil.rmtree(second.path / "data" / "clean")
    # Without --single-item DVC would also look at the source.
    second.shell("dvc repro --force --single-item clean split")
    assert results(second) == results(first)

    # The source grows: `dvc update` takes the new version, and the stages notice.
    draw_more(elsewhere / "shapes")
    shutil.make_archive(str(elsewhere / "shapes"), "zip", elsewhere / "shapes")
    second.shell("dvc update data/shapes.zip.dvc")
    assert "Running stage 'clean'" in second.shell("dvc repro split")
    assert kept(second) == 68


def draw_more(folder: Path) -> None:
    """Add one picture to each class: an existing one upside down."""
    for shape in folder.iterdir():
        picture = min(shape.iterdir())
        with Image.open(picture) as image:
            ImageOps.flip(image).save(shape / f"flipped_{picture.name}")


@pytest.mark.nightly(seconds=60)
def test_an_added_folder_can_be_pushed_and_pulled(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    first = copy_checkout(tmp_path / "first")
    draw_shapes(first.path / "data" / "shapes")
    configure(first, "data/shapes")
    first.shell(f"dvc add data/shapes && dvc remote add --default store {tmp_path}/remote")
    first.shell("dvc repro split && git add -A && git commit -qm 'Shapes' && dvc push")
    second = clone(first, tmp_path / "second")
    shutil.rmtree(first.path / ".dvc" / "cache")
    second.shell("dvc pull data/shapes.dvc && dvc repro split")
    assert results(second) == results(first)
    assert kept(second) == 64


def test_repro_without_a_pull_names_the_missing_data(tmp_path: Path) -> None:
    """Proves that the tests above pass because of the pull."""
    (tmp_path / "first").mkdir()
    first = copy_checkout(tmp_path / "first")
    draw_shapes(first.path / "data" / "shapes")
    configure(first, "data/shapes")
    first.shell("dvc add data/shapes && git add -A && git commit -qm Shapes")
    second = clone(first, tmp_path / "second")
    assert "data/shapes" in second.shell("dvc repro split", succeeds=False)
