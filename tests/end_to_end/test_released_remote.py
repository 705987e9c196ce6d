"""The released model through a DVC remote, by the commands of docs/how-to/hand_over.md.

The remote is a folder on this machine.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipway.project.creation import _IGNORED
from tests.artifacts.test_signature import write_keys
from tests.serving.bundles import certify, write_bundle

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/hand_over.md"
ENVIRONMENT = {"DVC_NO_ANALYTICS": "1", "GIT_CONFIG_NOSYSTEM": "1"}


def shell(script: str, folder: Path, home: Path) -> str:
    """Run a script as in a terminal of a new user; fail with its output."""
    bin_folder = Path(sys.executable).parent
    variables = ENVIRONMENT | {"HOME": str(home), "PATH": f"{bin_folder}:/usr/bin:/bin"}
    variables |= {"PYTHONPATH": str(PAGE.parents[2]), "DVC_SITE_CACHE_DIR": str(home / "dvc")}
    script = f'set -e\nslipway() {{ python -m slipway.cli "$@"; }}\n{script}'
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly(seconds=60)
def test_released_model_is_pushed_fetched_by_its_tag_and_verified(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## A DVC remote")[2].partition("\n## ")[0]
    push, get = re.findall(r"```bash\n(.*?)```", section, re.S)
    push = push.replace("s3://models/flowers", str(tmp_path / "remote"))
    get = get.replace("REPOSITORY", str(tmp_path / "project"))
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    elsewhere.mkdir()
    certify(project / "artifacts/certificate.json", write_bundle(project / "artifacts/bundle"))
    write_keys(project, "signing")
    write_keys(elsewhere, "other")
    (elsewhere / "signing.pub").write_bytes((project / "signing.pub").read_bytes())
    (project / ".gitignore").write_text(_IGNORED)
    git = "git init -q && git config user.name a && git config user.email a@b.c && dvc init -q"
    shell(f"{git}\n{push}", project, tmp_path)
    assert not (elsewhere / "model").exists()
    assert "signed with the key of signing.pub" in shell(get, elsewhere, tmp_path)
    assert (elsewhere / "model/bom.cdx.json").is_file()
    with pytest.raises(AssertionError, match="Key mismatch"):
        shell("slipway verify-bundle model --key other.pub", elsewhere, tmp_path)
