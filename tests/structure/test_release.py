"""`make release`: what it refuses before it builds, and what it leaves for a person to publish."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.end_to_end.project import copy_checkout


@pytest.fixture(name="clone")
def _clone(tmp_path: Path) -> Path:
    """A repository with what the first checks of a release read."""
    for name in (".ci/release", "pyproject.toml", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    author = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    for words in (("init", "-q"), ("add", "-A"), (*author, "commit", "-qm", "A release")):
        subprocess.run(["git", *words], cwd=folder, check=True)


def refusal(folder: Path, **variables: str) -> str:
    done = subprocess.run(
        [".ci/release"], cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert not (folder / "dist").exists()
    return done.stderr


@pytest.mark.process
def test_a_release_refuses_the_tag_of_another_version(clone: Path) -> None:
    assert "the tag is v9.9.9, expected v0." in refusal(clone, TAG="v9.9.9")


@pytest.mark.process
def test_a_release_refuses_a_version_without_a_date_in_the_changelog(clone: Path) -> None:
    text = (clone / "CHANGELOG.md").read_text()
    (clone / "CHANGELOG.md").write_text(text.replace(" - 20", " - unreleased 20", 1))
    commit(clone)
    assert "has no date for 0." in refusal(clone)


@pytest.mark.process
def test_a_release_refuses_edits_that_no_commit_holds(clone: Path) -> None:
    (clone / "new.txt").write_text("an edit")
    assert "changes without a commit" in refusal(clone)


@pytest.mark.nightly(seconds=300)
@pytest.mark.timeout(1800)
def test_a_release_holds_tried_packages_an_image_context_and_the_site(tmp_path: Path) -> None:
    project = copy_checkout(tmp_path)
    known = project.shell("uv pip install --dry-run --target other torch || true")
    if "Would" not in known:
        pytest.skip(f"no package index answers: {known[-300:]}")
    said = project.shell("make release", timeout_s=1500)
    dist = tmp_path / "dist"
    names = {path.name.partition("-")[0] for path in dist.iterdir()}
    assert names == {"slipway_ml", "SHA256SUMS", "NEXT.md", "image", "site"}
    assert (dist / "image/env/docker/Dockerfile").is_file()
    assert (dist / "site/docs/how-to/installation.html").is_file()
    assert (dist / "NEXT.md").read_text() in said
