"""Ray: the same results as here, also when a worker dies; faults of our functions come through; a clear word without Ray."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipway import files
from slipway.data import ray_engine
from slipway.data.code_version import pixel_code
from slipway.data.parallel import ordered_map
from slipway.errors import UnavailableError

ROOT = Path(__file__).parents[2]
with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (extra cluster)")
TRANSFORM = "import time\ndef halve(image):\n    time.sleep(0.005)\n    return image.reduce(2), {'width': image.width}\n"
MAPPING = """
import sys
from slipway.data import parallel, ray_engine
from slipway.errors import DataError
def work(number):
    if number == 700:
        raise DataError("700 is refused")
    return number * number
if __name__ == "__main__":
    numbers = range(int(sys.argv[1]))
    try:
        print(list(parallel.ordered_map(work, numbers, 2, lambda _: 1, "ray")) == [number * number for number in numbers])
    except Exception as error:
        print(type(error).__name__, error)
"""


def run_python(folder: Path, *arguments: str, **variables: str) -> str:
    """The last line that a Python process in `folder` printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": f"{ROOT}:{folder}", "HOME": str(folder / "home")} | variables
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def digests(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): files.sha256_file(path) for path in sorted(root.rglob("*")) if path.is_file()}


@with_ray
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to find Ray's workers")
def test_a_packing_on_ray_is_the_same_though_a_worker_is_killed(tmp_path: Path) -> None:
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
@pytest.mark.slow
def test_results_come_in_order_and_faults_come_through(tmp_path: Path) -> None:
    (tmp_path / "mapping.py").write_text(MAPPING)
    assert run_python(tmp_path, "mapping.py", "600") == "True"
    assert run_python(tmp_path, "mapping.py", "800") == "DataError 700 is refused"


@with_ray
@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "mapping.py").write_text(MAPPING)
    answer = run_python(tmp_path, "mapping.py", "10", RAY_ADDRESS="127.0.0.1:1")
    assert answer.startswith("UnavailableError the Ray cluster at 127.0.0.1:1 (RAY_ADDRESS) cannot be reached"), answer


def test_without_ray_the_extra_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "find_spec", lambda _: None)
    with pytest.raises(UnavailableError, match=r"data\.engine is ray, but Ray is not installed. Install the extra"):
        ordered_map(str, range(3), 1, lambda _: 1, "ray")


def test_a_worker_with_other_code_is_refused() -> None:
    assert ray_engine._map_chunk(str, [1, 2], pixel_code()) == ["1", "2"]
    with pytest.raises(UnavailableError, match="another version of Slipway, Pillow, simplejpeg or NumPy"):
        ray_engine._map_chunk(str, [1, 2], "0" * 64)
