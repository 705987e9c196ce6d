"""How many things can run at once: the cores that the system lets this process use, and no more than a container's CPU quota pays for.

A container with a limit of two CPUs sees all cores of its machine, and threads beyond the quota only make it stand still until the next
period. The quota is that of the process's control group or of the strictest one above it, in version 2 (`cpu.max`) and version 1
(`cpu.cfs_quota_us`). Kubernetes' `requests` are no quota: a process cannot see them.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes a space in a path


def num_cores(process: Path = _PROCESS) -> int:
    """The number of cores this process may use, a part of one counted as one. `process` is its folder in /proc."""
    num_seen = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = cpu_quota(process)
    return num_seen if quota is None else min(num_seen, max(1, math.ceil(quota)))


@cache
def cpu_quota(process: Path = _PROCESS) -> float | None:
    """The CPUs that the process's control groups let it use on average; None without a limit, or where there are no such groups."""
    with suppress(OSError):
        groups = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
        return min(
            (limit for folder in _folders(groups, mounts) if (limit := _limit(folder)) is not None),
            default=None,
        )
    return None


def _folders(groups: list[str], mounts: list[str]) -> Iterator[Path]:
    """The folders of the control groups that the process is in, from its own up to the highest that is mounted here."""
    for line in groups:
        _, controllers, path = line.split(":", 2)
        for mount in mounts:
            place, _, system = mount.partition(" - ")
            root, mount_point = (_unescaped(field) for field in place.split()[3:5])
            kind, _, options = system.split(" ", 2)
            is_v2 = kind == "cgroup2" and not controllers
            is_v1 = (
                kind == "cgroup" and "cpu" in controllers.split(",") and "cpu" in options.split(",")
            )
            if is_v1 or is_v2:
                # Where the group is not below what is mounted, the container's own group is the mount itself.
                is_below = (
                    PurePosixPath(path).is_relative_to(root)
                    and ".." not in PurePosixPath(path).parts
                )
                below = PurePosixPath(path).relative_to(root) if is_below else PurePosixPath()
                yield from (Path(mount_point) / part for part in [below, *below.parents])


def _limit(folder: Path) -> float | None:
    with suppress(OSError, ValueError, ZeroDivisionError):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
            return None if quota == "max" else int(quota) / int(period)
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    return None


def _unescaped(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
