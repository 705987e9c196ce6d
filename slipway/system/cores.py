"""Number of usable cores: the process's CPU affinity, capped by a container's CPU quota.

A container limited to two CPUs sees all cores of its machine, and threads beyond the quota only
stall until the next period. The quota is the strictest one of the process's control group and its
ancestors, in version 2 (`cpu.max`) or version 1 (`cpu.cfs_quota_us`). Kubernetes' `requests` are
not a quota: a process cannot see them.
"""

import math
import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self")
_OCTAL = re.compile(r"\\([0-7]{3})")  # mountinfo's form of a space in a path


def num_cores(process: Path = _PROCESS) -> int:
    """Return the number of cores that this process may use, at least 1.

    A quota of a fraction of a core counts as one core. `process` is the process's folder in /proc.
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    num_seen = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = cpu_quota(process)
    return num_seen if quota is None else min(num_seen, max(1, math.ceil(quota)))


@cache
def cpu_quota(process: Path = _PROCESS) -> float | None:
    """Return the average number of CPUs that control groups allow, such as 2.5.

    None if there is no limit, or if the system has no control groups.
    """
    with suppress(OSError):
        groups = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
        limits = [_limit(folder) for folder in _group_folders(groups, mounts)]
        return min((limit for limit in limits if limit is not None), default=None)
    return None


def _group_folders(groups: list[str], mounts: list[str]) -> Iterator[Path]:
    """Yield the folders of the process's control groups, from its own up to the highest mounted."""
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for mount in mounts:
            place, _, system = mount.partition(" - ")
            root, mount_point = (
                _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
                for field in place.split()[3:5]
            )
            kind, _, options = system.split(" ", 2)
            is_v2 = kind == "cgroup2" and not controllers
            has_cpu = "cpu" in controllers.split(",") and "cpu" in options.split(",")
            if is_v2 or (kind == "cgroup" and has_cpu):
                group = PurePosixPath(path)
                # Outside the mount, the container's own group is the mount itself.
                is_below = group.is_relative_to(root) and ".." not in group.parts
                below = group.relative_to(root) if is_below else PurePosixPath()
                yield from (Path(mount_point) / part for part in [below, *below.parents])


def _limit(folder: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    return None


def cpu_model() -> str:
    """Return the processor's name, such as "AMD EPYC 9B14"; the architecture if none is given."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
