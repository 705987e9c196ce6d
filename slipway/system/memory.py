"""Memory as Linux reports it: of this process, and what is free for it."""

from pathlib import Path

_STATUS, _MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # version 2


def status_bytes(key: str) -> int:
    """Read a size such as VmRSS from /proc/self/status; 0 if it is missing."""
    return _size_in(_STATUS, key) or 0


def own_bytes() -> int:
    """Current memory of this process that is not mapped from files; 0 if unknown."""
    return status_bytes("RssAnon")


def free_bytes() -> int | None:
    """Free memory of the machine, or of the container if it has less; None if unknown."""
    known = (_size_in(_MEMINFO, "MemAvailable"), _free_in_container())
    return min((size for size in known if size is not None), default=None)


def _free_in_container() -> int | None:
    """Limit of the control group less its use; None without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _size_in(path: Path, key: str) -> int | None:
    """Find the line `KEY:  NUMBER kB` of a file in /proc."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
