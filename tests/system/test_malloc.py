"""Settings of malloc, each tested in its own process, because they hold for a whole process."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

FAULTS = """
import resource, sys
import numpy as np
from slipway.system.malloc import keep_freed_pages
if sys.argv[1] == "kept" and not keep_freed_pages():
    sys.exit(3)
def batch():
    images = np.ones((64, 96, 96, 3), np.uint8)
    return [images + 1, images + 2]
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    batch()
begin = faults()
for _ in range(20):
    batch()
print(faults() - begin)
"""


def page_faults(way: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, way], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode == 3:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_training_reuses_memory_that_the_previous_batch_freed() -> None:
    assert page_faults("kept") < 100
    assert page_faults("given back") > 1000  # otherwise there is nothing to keep


HELD = """
import resource, sys
from pathlib import Path
from slipway.system.malloc import release_freed_pages
if sys.argv[1] == "given back" and not release_freed_pages():
    sys.exit(3)
held = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
def picture(megabytes):
    block = bytearray(megabytes << 20)
    # They lie behind it unless it is a mapping of its own.
    small = [bytearray(1000) for _ in range(100)]
    return small
picture(20)
begin = held()
kept = [picture(20) for _ in range(5)]
print(held() - begin)
"""


def held_bytes(way: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", HELD, way], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode == 3:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_service_returns_the_memory_of_large_pictures_to_the_system() -> None:
    assert held_bytes("given back") < 2_000_000
    assert held_bytes("as glibc likes") > 15_000_000  # otherwise there is nothing to give back
