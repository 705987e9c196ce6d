"""Tests of the map on Ray: the same results as local ones, killed workers, clear errors."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipway.data.engine import ray as ray_engine
from slipway.data.engine.code_version import pixel_code
from slipway.data.engine.parallel import ordered_map
from slipway.system import files
from slipway.system.errors import UnavailableError

ROOT = Path(__file__).parents[3]
with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (extra ray)")
TRANSFORM = """import time
def halve(image):
    time.sleep(0.005)
    return image.reduce(2), {'width': image.width}
"""
MAPPING = """
import sys
from slipway.data.engine import parallel, ray as ray_engine
from slipway.system.errors import DataError
def work(number):
    if number == 700:
        raise DataError("700 is refused")
    return number * number
if __name__ == "__main__":
    numbers = range(int(sys.argv[1]))
    try:
        found = list(parallel.ordered_map(work, numbers, 2, lambda _: 1, "ray"))
        print(found == [number * number for number in numbers])
    except Exception as error:
        print(type(error).__name__, error)
"""


def run_python(folder: Path, *arguments: str, **variables: str) -> str:
    """Return the last line that a Python process in `folder` printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": f"{ROOT}:{folder}", "HOME": str(folder / "home")} | variables
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def digests(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): files.sha256_file(path)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@with_ray
@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to find Ray's workers")
def test_packing_on_ray_is_identical_even_if_a_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow_transform.py").write_text(TRANSFORM)
    command = ("-m", "tests.data.pack_on_ray")
    assert run_python(tmp_path, *command, str(tmp_path / "local"), "local") == "0"
    assert run_python(tmp_path, *command, str(tmp_path / "ray"), "ray") == "0"
    assert run_python(tmp_path, *command, str(tmp_path / "killed"), "ray", "kill") == "1"
    expected = digests(tmp_path / "local" / "packed")
    assert len(expected) > 8
    assert digests(tmp_path / "ray" / "packed") == expected
    assert digests(tmp_path / "killed" / "packed") == expected
    assert not (tmp_path / "home" / ".ray").exists(), "Ray leaves nothing in the home folder"


@with_ray
@pytest.mark.nightly(seconds=35)
def test_ray_returns_results_in_order_and_raises_errors_of_the_function(tmp_path: Path) -> None:
    (tmp_path / "mapping.py").write_text(MAPPING)
    assert run_python(tmp_path, "mapping.py", "600") == "True"
    assert run_python(tmp_path, "mapping.py", "800") == "DataError 700 is refused"


CLUSTER = """
import sys, ray
ray.init(
    address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
    _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1],
)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@with_ray
@pytest.mark.nightly
def test_ray_uses_a_running_cluster_and_leaves_it_running(tmp_path: Path) -> None:
    (tmp_path / "mapping.py").write_text(MAPPING)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "only_here.py").write_text(MAPPING)
    (tmp_path / "mapping_elsewhere.py").write_text(
        MAPPING.replace("import sys", "import sys, only_here").replace("(work,", "(only_here.work,")
    )
    folder = tempfile.mkdtemp(prefix="slipway-")  # the path of a socket must be short
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    of_cluster = {
        **os.environ,
        **variables,
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, "-c", CLUSTER, folder]
    with subprocess.Popen(
        command, env=of_cluster, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as cluster:
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip().splitlines()[-1]
        for _ in range(2):
            assert (
                run_python(tmp_path, "mapping.py", "600", RAY_ADDRESS=address, **variables)
                == "True"
            )
        answer = run_python(
            tmp_path,
            "mapping_elsewhere.py",
            "600",
            RAY_ADDRESS=address,
            **variables,
            PYTHONPATH=f"{ROOT}:{tmp_path / 'path'}",
        )
        assert answer.startswith("UnavailableError a Ray worker cannot run this: "), answer
        assert "No module named 'only_here'. Install Slipway" in answer
        assert cluster.poll() is None
        assert not (tmp_path / ".work").exists(), "no cluster of its own was started"
        cluster.communicate()
    shutil.rmtree(folder)


@with_ray
@pytest.mark.process
def test_error_names_an_unreachable_ray_cluster(tmp_path: Path) -> None:
    (tmp_path / "mapping.py").write_text(MAPPING)
    answer = run_python(tmp_path, "mapping.py", "10", RAY_ADDRESS="127.0.0.1:1")
    assert answer.startswith(
        "UnavailableError the Ray cluster at 127.0.0.1:1 (RAY_ADDRESS) cannot be reached"
    ), answer


def test_error_without_ray_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "find_spec", lambda _: None)
    with pytest.raises(
        UnavailableError, match=r"data\.engine is ray, but Ray is not installed. Install the extra"
    ):
        ordered_map(str, range(3), 1, lambda _: 1, "ray")


def test_a_ray_worker_with_different_code_is_refused() -> None:
    assert ray_engine._map_chunk(str, [1, 2], pixel_code()) == ["1", "2"]
    with pytest.raises(
        UnavailableError, match="another version of Slipway, Pillow, simplejpeg or NumPy"
    ):
        ray_engine._map_chunk(str, [1, 2], "0" * 64)
