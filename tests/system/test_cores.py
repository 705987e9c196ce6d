"""The number of usable cores, with simulated Linux control groups."""

import os
from pathlib import Path

import pytest

from slipway.system.cores import cpu_model, cpu_quota, num_cores

CORES = 8


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(CORES)))


def process(folder: Path, groups: str, mounts: str, **limits: str) -> Path:
    """Make a process's folder of /proc, and return it.

    `mounts` name the place as MOUNT. `limits` are files below it by path, with `__` for a slash.
    """
    mount, proc = folder / "mount", folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(
        "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n" + mounts.replace("MOUNT", str(mount))
    )
    for name, content in limits.items():
        path = mount / name.replace("__", "/").replace("cpu_", "cpu.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return proc


def v2(folder: Path, groups: str = "0::/\n", root: str = "/", **limits: str) -> Path:
    return process(
        folder,
        groups,
        f"30 22 0:26 {root} MOUNT rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        **limits,
    )


def v1(folder: Path, groups: str, root: str, **limits: str) -> Path:
    mounts = (
        f"33 30 0:30 {root} MOUNT_of_memory rw,nosuid - cgroup cgroup rw,memory\n"
        f"34 30 0:31 {root} MOUNT rw,nosuid master:9 - cgroup cgroup rw,cpu,cpuacct\n"
    )
    return process(folder, groups, mounts, **limits)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("5000 100000\n", 1),
        ("max 100000\n", CORES),
        ("3200000 100000\n", CORES),
    ],
    ids=["two", "one and a half", "a twentieth", "no limit", "more than there are"],
)
def test_cgroup_v2_quota_bounds_the_cores_rounded_up(
    tmp_path: Path, content: str, expected: int
) -> None:
    assert num_cores(v2(tmp_path, cpu_max=content)) == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [("300000\n", 3), ("250000\n", 3), ("1000\n", 1), ("-1\n", CORES)]
)
def test_cgroup_v1_quota_bounds_the_cores(tmp_path: Path, quota: str, expected: int) -> None:
    groups = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/system.slice\n"
    assert (
        num_cores(
            v1(
                tmp_path,
                groups,
                "/docker/abc",
                cpu_cfs_quota_us=quota,
                cpu_cfs_period_us="100000\n",
            )
        )
        == expected
    )


def test_cores_are_limited_by_the_strictest_quota_of_all_ancestor_groups(tmp_path: Path) -> None:
    limits = {
        "pod__own__cpu_max": "600000 100000",
        "pod__cpu_max": "400000 100000",
        "cpu_max": "max 100000",
    }
    assert num_cores(v2(tmp_path, "0::/pod/own\n", **limits)) == 4


def test_quota_of_another_control_group_is_ignored(tmp_path: Path) -> None:
    assert num_cores(v2(tmp_path, "0::/pod/own\n", pod__other__cpu_max="100000 100000")) == CORES


def test_quota_is_found_if_only_a_subtree_of_control_groups_is_mounted(tmp_path: Path) -> None:
    proc = v2(
        tmp_path,
        "0::/kubepods/pod/own\n",
        "/kubepods/pod",
        own__cpu_max="300000 100000",
        cpu_max="500000 100000",
    )
    assert num_cores(proc) == 3


@pytest.mark.parametrize("path", ["/../elsewhere", "/kubepods/other"])
def test_quota_of_the_mount_applies_to_a_control_group_outside_it(
    tmp_path: Path, path: str
) -> None:
    assert num_cores(v2(tmp_path, f"0::{path}\n", "/kubepods/pod", cpu_max="200000 100000")) == 2


@pytest.mark.parametrize("content", ["", "200000", "two 100000", "200000 0"])
def test_malformed_cgroup_file_means_no_limit(tmp_path: Path, content: str) -> None:
    assert num_cores(v2(tmp_path, cpu_max=content)) == CORES


def test_quota_is_found_in_a_mount_whose_path_has_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "a place"
    folder.mkdir()
    proc = v2(folder, cpu_max="200000 100000")
    mounts = proc / "mountinfo"
    mounts.write_text(mounts.read_text().replace("a place", r"a\040place"))
    assert num_cores(proc) == 2


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert num_cores(tmp_path) == CORES


def test_num_cores_is_at_least_one_and_at_most_the_visible_cores() -> None:
    assert 1 <= num_cores() <= len(os.sched_getaffinity(0))


def test_cpu_model_returns_the_processors_name() -> None:
    assert 3 < len(cpu_model()) < 100
    information = Path("/proc/cpuinfo").read_text()
    if "model name" in information:
        assert f": {cpu_model()}\n" in information
