"""Joins the data sets listed in `data.sources`, below `data.path`, in a fixed order.

A data set's name is its path relative to `data.path`. The `source` of each row contains it:
"clinic_a/cat/1.png" for class folders, "17:clinic_b.csv" for row 17 of all joined tables.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from slipway.config.sections import DataParams
from slipway.system.errors import DataError

_WILDCARDS = frozenset("*?[")


def source_names(data: DataParams) -> list[str]:
    """Return the names that the globs in `data.sources` match, in their order.

    The matches of one glob are sorted by name. Raises DataError, which names every entry without a
    match and every file in two sources.
    """
    root = Path(data.path)
    if not root.is_dir():
        raise DataError(
            f"data.path {data.path!r} is not a folder, but data.sources are paths in it. "
            "Point data.path at the folder that holds them, or set data.sources to null."
        )
    found: dict[Path, str] = {}  # names by resolved path
    above: dict[Path, str] = {}  # a name below each folder that holds one
    problems = []
    for entry in data.sources or ():
        matches = _matches(root, entry)
        if not matches:
            problems.append(f"  {entry!r} matches nothing in {data.path}")
        for path in matches:
            name = path.relative_to(root).as_posix()
            place = path.resolve()
            folders = place.parents
            others = [found[part] for part in (place, *folders) if part in found]
            if place in above:
                others.append(above[place])
            if others:
                problems.append(f"  {name} of {entry!r} belongs to {others[0]} as well")
            found.setdefault(place, name)
            for folder in folders:
                above.setdefault(folder, name)
    if problems:
        raise DataError(
            "data.sources cannot be joined:\n" + "\n".join(problems) + "\n"
            "Expected paths or globs relative to data.path that name each file once."
        )
    return list(found.values())


def _matches(root: Path, entry: str) -> list[Path]:
    if not _WILDCARDS & set(entry) or (root / entry).exists():
        return [root / entry] if (root / entry).exists() else []
    return [
        path
        for path in sorted(root.glob(entry))
        # DVC writes NAME.dvc beside data that it tracks.
        if path.suffix != ".dvc"
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]


def image_folders(data: DataParams) -> dict[str, str]:
    """Return for each joined table the folder below `data.path` to which its paths are relative."""
    names = [] if data.sources is None else source_names(data)
    return {
        name: name if Path(data.path, name).is_dir() else PurePosixPath(name).parent.as_posix()
        for name in names
    }


def origin_of(source: str, names: Sequence[str]) -> str:
    """Return the joined source, among `names`, that contains a row; "" if there is none."""
    texts = {source, source.partition(":")[2]}
    fitting = [
        name
        for name in names
        for text in texts
        if text == name or text.startswith((f"{name}/", f"{name}:"))
    ]
    return max(fitting, key=len, default="")
