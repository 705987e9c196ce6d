"""`make install` builds an environment only if the present one lacks the locked packages."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from slipway.export.targets.browser.export import VERSION

LOCK = "numpy==2.4.6\n"
# Records its calls, and writes what the script changes afterwards.
UV = """#!/bin/sh
echo "$@" >> "$CALLS"
case " $* " in
*" venv "*)
  mkdir -p .venv/bin .venv/lib/python3.11/site-packages
  ln -sf "$PYTHON" .venv/bin/python
  cp "$0" .venv/bin/uv
  printf '    unset VIRTUAL_ENV\\n' > .venv/bin/activate
  printf '    set -e VIRTUAL_ENV\\n' > .venv/bin/activate.fish
  echo "relocatable = true" > .venv/pyvenv.cfg ;;
*" --dry-run "*) exit "${NO_CPU_INDEX:-1}" ;;
*" --editable "*)
  mkdir -p .venv/lib/python3.11/site-packages/slipway/assets
  printf /somewhere > .venv/lib/python3.11/site-packages/_slipway_ml.pth
  touch .venv/bin/slipway && chmod +x .venv/bin/slipway ;;
esac
"""
EDITABLE = (
    "pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --offline "
    "--editable ."
)


@pytest.fixture(name="project")
def _project(root: Path, tmp_path: Path) -> Path:
    """A project with the script, both locks and a built environment."""
    folder = tmp_path / "project"
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    shutil.copy(root / "install.sh", folder)
    for name in ("requirements.lock", "requirements.cpu.lock"):
        (folder / name).write_text(LOCK)
    (commands / "python").symlink_to(sys.executable)
    command(commands, "slipway", "")
    (commands / "activate").write_text("BENTOML_HOME=.bentoml\n")
    (folder / ".venv" / ".complete").write_text(LOCK)
    return folder


def install(
    project: Path, python: str = sys.executable, *, uv: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run install.sh with only the system's commands and, on request, a `uv` that records calls."""
    tools = project.parent / "tools"
    tools.mkdir(exist_ok=True)
    if uv:
        (tools / "uv").write_text(UV)
        (tools / "uv").chmod(0o755)
    return subprocess.run(
        ["bash", "install.sh", python, "demo"],
        cwd=project,
        env={
            "PATH": f"{tools}:/usr/bin:/bin",
            "PYTHON": sys.executable,
            "CALLS": str(tools / "calls"),
            "HOME": str(project),
        }
        | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def calls(project: Path) -> list[str]:
    """The arguments of each call of `uv`."""
    path = project.parent / "tools" / "calls"
    return path.read_text().splitlines() if path.exists() else []


def command(folder: Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def old_python(folder: Path, name: str = "python3.9") -> str:
    """An interpreter that says it is Python 3.9 and can do nothing else."""
    return command(folder, name, '[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1')


def test_an_environment_with_the_locked_packages_is_taken_as_it_is(project: Path) -> None:
    done = install(project)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_environment_with_all_packages_serves_a_machine_without_a_driver(project: Path) -> None:
    (project / "requirements.cpu.lock").write_text("")
    done = install(project, uv=True)
    assert (done.returncode, calls(project)) == (0, [])


def test_a_linked_environment_with_the_locked_packages_is_taken_in_a_fresh_clone(
    project: Path, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copy(project / "install.sh", clone)
    for name in ("requirements.lock", "requirements.cpu.lock"):
        (clone / name).write_text(LOCK)  # newer than the environment
    (clone / ".venv").symlink_to(project / ".venv")
    done = install(clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_linked_environment_with_other_packages_is_refused_with_the_way_out(
    project: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    (project / ".venv").rename(shared)
    (project / ".venv").symlink_to(shared)
    (shared / ".complete").write_text("numpy==2.5.5\n")
    done = install(project, LOCK="requirements.lock")
    assert done.returncode == 1
    for part in (
        f"a link to {shared}",
        "does not hold the packages of requirements.lock",
        "remove the link",
    ):
        assert part in done.stderr


def test_the_installation_says_its_size_and_is_done_by_uv_with_hashes(project: Path) -> None:
    shutil.rmtree(project / ".venv")
    done = install(project, uv=True, LOCK="requirements.cpu.lock")
    assert done.returncode == 0, done.stderr
    assert re.search(r"GB to download, [\d.]+ GB on disk", done.stderr)
    venv, probe, *later = calls(project)
    assert venv == f"venv --quiet --clear --relocatable --python {sys.executable} .venv"
    assert "--torch-backend=cpu --dry-run" in probe
    assert later == [
        "pip sync --python .venv/bin/python --require-hashes requirements.cpu.lock",
        EDITABLE,  # after it, because it removes the project
    ]
    assert (project / ".venv/.complete").read_text() == LOCK
    assert install(project, uv=True, LOCK="requirements.cpu.lock").stderr == ""


def test_changed_locks_only_change_the_packages_of_the_environment(project: Path) -> None:
    """Nothing is built anew, so what an interrupted installation did is not lost either."""
    shutil.rmtree(project / ".venv")
    install(project, uv=True)
    (project / ".venv/.complete").unlink()
    (project.parent / "tools/calls").unlink()
    assert install(project, uv=True).returncode == 0
    assert [call.split()[1] for call in calls(project)] == ["install", "sync", "install"]


CPU_LOCK = """\
# comment
numpy==2.4.6 \\
    --hash=sha256:aa
nvidia-cublas==13.1 ; sys_platform == 'linux' \\
    --hash=sha256:bb
nvidia-ml-py==13.6 \\
    --hash=sha256:cc
torch==2.14.1 ; python_version < '4' \\
    --hash=sha256:dd
torchmetrics==1.9.0 \\
    --hash=sha256:ee
torchvision==0.29.2 \\
    --hash=sha256:ff
"""


def test_pytorch_for_cpus_is_taken_where_its_index_answers(project: Path) -> None:
    shutil.rmtree(project / ".venv")
    (project / "requirements.cpu.lock").write_text(CPU_LOCK)
    done = install(project, uv=True, LOCK="requirements.cpu.lock", NO_CPU_INDEX="0")
    assert done.returncode == 0, done.stderr
    assert "about 1.2 GB to download, 3 GB on disk" in done.stderr
    _, probe, sync, torch, editable = calls(project)
    assert probe == f"{torch.replace('=cpu ', '=cpu --dry-run ')}"
    assert torch.endswith(" --torch-backend=cpu torch==2.14.1 torchvision==0.29.2")
    assert editable == EDITABLE
    chosen = (project / sync.split()[-1]).read_text()
    assert re.findall("^[a-z-]+", chosen, re.MULTILINE) == ["numpy", "nvidia-ml-py", "torchmetrics"]
    assert chosen.count("--hash") == 3
    assert (project / ".venv/.complete").read_text() == CPU_LOCK


def test_the_ordinary_pytorch_is_taken_and_named_if_that_index_is_silent(project: Path) -> None:
    shutil.rmtree(project / ".venv")
    done = install(project, uv=True, LOCK="requirements.cpu.lock")
    assert done.returncode == 0
    assert "does not answer: taking the larger build for CUDA" in done.stderr
    assert "3.4 GB to download" in done.stderr


def test_an_older_environment_gets_only_the_project(project: Path) -> None:
    shutil.rmtree(project / ".venv")
    install(project, uv=True)
    (project / ".venv/bin/slipway").unlink()
    (project.parent / "tools/calls").unlink()
    done = install(project)
    assert (done.returncode, done.stderr, calls(project)) == (0, "", [EDITABLE])


def test_the_code_beside_an_environment_comes_before_the_code_that_was_installed(
    project: Path,
) -> None:
    shutil.rmtree(project / ".venv")
    install(project, uv=True)
    (site,) = project.glob(".venv/lib/python3.*/site-packages")
    assert (site / "_slipway_ml.pth").read_text() == "../../../..\n/somewhere"
    assert not (site / "slipway").exists()


def test_uv_keeps_its_downloads_in_the_clone_only_without_a_home(project: Path) -> None:
    uv = UV.replace("\n", '\necho "cache ${UV_CACHE_DIR-of the user}" >> "$CALLS"\n', 1)
    for home, place in ((project, "of the user"), (project / "none", f"{project}/.work/cache/uv")):
        shutil.rmtree(project / ".venv")
        command(project.parent / "tools", "uv", uv.removeprefix("#!/bin/sh\n"))
        assert install(project, HOME=str(home)).returncode == 0
        assert calls(project)[0] == f"cache {place}"
        (project.parent / "tools/calls").unlink()
    assert not (project / "none").exists()


@pytest.mark.parametrize("driver", [True, False])
def test_a_driver_chooses_the_lock_with_what_only_a_gpu_uses(project: Path, driver: bool) -> None:
    if not driver and Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver")
    if driver:
        command(project.parent / "tools", "nvidia-smi", "exit 0")
    shutil.rmtree(project / ".venv")
    assert install(project, uv=True).returncode == 0
    assert calls(project)[-2].split()[-1] == f"requirements{'' if driver else '.cpu'}.lock"


def test_uv_is_fetched_by_pip_with_its_hash_if_it_is_missing(project: Path, tmp_path: Path) -> None:
    block = "uv==0.13.8 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
    (project / "requirements.cpu.lock").write_text(
        f"{LOCK}{block}zstd==1 \\\n    --hash=sha256:cc\n"
    )
    shutil.rmtree(project / ".venv")
    fetched = tmp_path / "uv"
    fetched.write_text(UV)
    fetched.chmod(0o755)
    pip = f'[ "$1" = -c ] && exit; echo "$@" >> {tmp_path}/pip; cp {fetched} "$(dirname "$0")/uv"'
    python = command(
        tmp_path / "pythons",
        "python3.12",
        '[ "$1" = -c ] && exit; mkdir -p .work/uv/bin; cp "$0.pip" .work/uv/bin/python',
    )
    command(tmp_path / "pythons", "python3.12.pip", pip)
    done = install(project, python, LOCK="requirements.cpu.lock")
    assert done.returncode == 0, done.stderr
    assert "--require-hashes --requirement .work/uv/uv.lock" in (tmp_path / "pip").read_text()
    assert (project / ".work/uv/uv.lock").read_text() == block
    assert (project / ".venv/.complete").exists()


def test_uv_fetches_a_python_if_the_machine_has_only_an_old_one(
    project: Path, tmp_path: Path
) -> None:
    (project / ".venv/.complete").unlink()
    old_python(tmp_path / "tools", "python3")
    done = install(project, "python3", uv=True)
    assert done.returncode == 0, done.stderr
    assert "--python 3.12 .venv" in calls(project)[0]


@pytest.mark.parametrize("uv", [True, False])
def test_an_unsupported_python_that_was_named_is_refused_before_anything_is_built(
    project: Path, tmp_path: Path, uv: bool
) -> None:
    (project / ".venv/.complete").unlink()
    done = install(project, old_python(tmp_path), uv=uv)
    assert done.returncode == 1
    assert (
        "Python 3.9.2 found, expected Python 3.11 to 3.14. Name one (make PYTHON=python3.12 demo)"
        in done.stderr
    )
    assert (project / ".venv/bin/python").exists()
    assert calls(project) == []


def test_another_system_than_linux_gets_the_way_out(project: Path, tmp_path: Path) -> None:
    command(tmp_path / "tools", "uname", "echo Darwin")
    done = install(project)
    assert done.returncode == 1
    assert "Slipway runs on Linux, and this is Darwin" in done.stderr
    assert "docker run" in done.stderr


def test_the_dev_container_installs_by_the_same_command(root: Path) -> None:
    content = json.loads((root / ".devcontainer/devcontainer.json").read_text())
    assert content["postCreateCommand"] == "make install"
    python = re.search(r"python:(3\.\d+)", content["image"])
    assert python
    requires = tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"]
    assert SpecifierSet(requires).contains(python[1])


INSTALLS = "ln -sf /bin/true promtool; ln -sf /bin/true chromium"


@pytest.mark.parametrize(
    ("apt", "npm", "error"),
    [
        (INSTALLS, "echo $5 > ../packed", None),
        ("exit 100", "", "cannot install prometheus and chromium"),
        (INSTALLS, "exit 1", f"npm cannot fetch onnxruntime-web@{VERSION}"),
    ],
    ids=["all", "no Debian packages", "no npm archive"],
)
def test_a_landing_without_the_tests_of_alerts_and_exported_page_is_rejected(
    root: Path, tmp_path: Path, apt: str, npm: str, error: str | None
) -> None:
    """They skip without `promtool`, Chromium and onnxruntime-web."""
    for path in (".ci/run", "slipway/export/targets/browser/export.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        shutil.copy(root / path, tmp_path / path)
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "dirname", "rm", "timeout", "ln", "true", "sed", "mkdir", "tee"):
        (folder / name).symlink_to(shutil.which(name) or name)
    made = "mkdir -p ../.venv/bin; ln -sf /bin/true ../.venv/bin/python"
    made += "\necho made with $ONNXRUNTIME_WEB"
    for name, text in (("apt-get", apt), ("npm", npm), ("make", made)):
        (folder / name).write_text(f"#!{folder}/bash\ncd {folder}\n{text}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / ".ci" / "run"],
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    if error is None:
        archive = tmp_path / f".work/onnxruntime-web-{VERSION}.tgz"
        assert done.stdout.splitlines() == [f"made with {archive}"] * 4, done.stderr
        assert (tmp_path / "packed").read_text() == f"onnxruntime-web@{VERSION}\n"
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert error in done.stderr
