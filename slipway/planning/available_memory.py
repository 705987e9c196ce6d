"""The memory that a training may take here: of the machine, of the container it is in, or of the GPU."""

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(*, on_gpu: bool) -> int | None:
    """Free now; None where the system does not tell."""
    if on_gpu:
        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    found = [
        value
        for value in (_of_machine(Path("/proc/meminfo")), _of_container(_CGROUP))
        if value is not None
    ]
    return min(found, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )


def _of_container(cgroup: Path) -> int | None:
    """Control groups, version 2; None without a limit."""
    try:
        limit, used = (
            (cgroup / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
