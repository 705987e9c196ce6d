"""Computes a quick digest of all inputs of the stage `code`, to skip its work if nothing changed.

DVC cannot see whether an installed package changed, so it always runs the stage `code` of a
project. The stage checks params and data and parses every module, which takes seconds. The stamp
only hashes the files.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from slipway.system import files

_PACKAGE = Path(__file__).parents[1]
_RECORD = Path(".work/code_stamp.json")
# Folders that stages and tools write; modules of the user are not allowed there.
WRITTEN = frozenset({"artifacts", "data", "metrics", "reports", "build", "dvc_plots"})


def code_stamp(root: Path) -> str:
    """Return the hex digest of params.yaml, the package, and the user's modules in `root`.

    The place of `root` counts, too, because the checks depend on it.
    """
    digest = hashlib.sha256(os.fsencode(root.absolute()))
    paths = [root / "params.yaml", *_all_below(_PACKAGE), *_users_files(root)]
    for path in sorted(paths):
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{path} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def remembered(root: Path, stamp: str) -> str | None:
    """Return the stage's output that was saved for this stamp; None if there is none."""
    try:
        content = json.loads((root / _RECORD).read_bytes())
        text = content["text"] if content["stamp"] == stamp else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return text if isinstance(text, str) else None


def remember_text(root: Path, stamp: str, text: str) -> None:
    """Save the text that the stage wrote for this stamp."""
    files.write_text(root / _RECORD, json.dumps({"stamp": stamp, "text": text}))


def _users_files(root: Path) -> Iterator[Path]:
    """Yield the user's modules, and every file in `transforms/`, which transforms may read."""
    yield from root.glob("*.py")
    for folder in (path for path in root.iterdir() if path.is_dir() and not path.is_symlink()):
        if folder.name == "transforms":
            yield from _all_below(folder)
        elif folder.name not in WRITTEN and not folder.name.startswith("."):
            yield from (path for path in _all_below(folder) if path.suffix == ".py")


def _all_below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and name[0] != "."]
        yield from (Path(place, name) for name in names if not name.endswith((".pyc", ".partial")))
