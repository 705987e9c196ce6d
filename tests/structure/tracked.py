"""The files of the repository that git tracks."""

import subprocess
from functools import cache
from pathlib import Path


@cache
def tracked_files(root: Path, endings: tuple[str, ...] = (".py",)) -> tuple[str, ...]:
    """The tracked files with one of the endings that are there, relative to `root`, sorted."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return tuple(
        path for path in sorted(listed) if path.endswith(endings) and (root / path).is_file()
    )
