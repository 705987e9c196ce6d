"""Reads sizes of memory from Linux, in bytes: the use of this process, and the free memory."""

from pathlib import Path

_STATUS, _MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # version 2


def status_bytes(key: str) -> int:
    """Return the size `key`, such as VmRSS, of /proc/self/status in bytes; 0 if it is missing."""
    return _size_in(_STATUS, key) or 0


def own_bytes() -> int:
    """Return this process's resident memory in bytes, without mapped files; 0 if unknown."""
    return status_bytes("RssAnon")


def free_bytes() -> int | None:
    """Return the free bytes of the machine, or of the container if it has less; None if unknown."""
    known = (_size_in(_MEMINFO, "MemAvailable"), _free_in_container())
    return min((size for size in known if size is not None), default=None)


def _free_in_container() -> int | None:
    """Return the control group's memory limit less its use, in bytes; None without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - used)


def _size_in(path: Path, key: str) -> int | None:
    """Return the size in the line `KEY: NUMBER kB` of a /proc file, in bytes.

    Returns None if it is missing.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)
