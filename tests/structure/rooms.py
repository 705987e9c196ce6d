"""The rooms of the code, from the bottom up, and the arrows between them.

An arrow is an import from one room into another. Each table lists its rooms in order and names
the rooms that each one may import: `metrics` may import `artifacts`. A row may name earlier rows
only, so no circle can be written down: `artifacts` cannot name `metrics`. A module that lies
directly in a divided folder is a room of its own if it has a row, as `slipway/serving/worker.py`.
Without a row it stands above the rooms of its folder, as `slipway/training/run.py`: it may import
all, and none may import it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.structure.syntax import imports

Table = Mapping[str, tuple[str, ...]]
TOP = "(top)"  # the modules of a divided folder that have no row
# What every part may import, the service included: few packages, no torch.
RING_0 = (*("system", "kinds", "inputs", "config", "artifacts", "metrics", "runtimes", "traffic"),)
_BELOW_TRAINING = (*RING_0, "data", "reports")
_BELOW_EXPORT = (*_BELOW_TRAINING, "training")
# The rooms of `slipway/`.
ROOMS: Table = {
    "system": (),
    "kinds": ("system",),
    "inputs": ("system", "kinds"),
    "config": ("system", "kinds", "inputs"),
    "artifacts": ("system", "kinds", "inputs"),
    "metrics": ("system", "kinds", "inputs", "artifacts"),
    "runtimes": ("system", "kinds", "inputs", "artifacts"),
    "traffic": ("system", "kinds", "inputs", "config", "artifacts"),
    "drift": RING_0,
    "predictor": RING_0,
    "data": RING_0,
    "reports": (*RING_0, "data"),
    "project": (*RING_0, "data"),
    "inference": (*RING_0, "predictor", "data"),
    "training": _BELOW_TRAINING,
    "planning": _BELOW_EXPORT,
    "profiling": (*_BELOW_EXPORT, "planning"),
    "export": (*_BELOW_EXPORT, "drift"),
    "preflight": (*_BELOW_EXPORT, "drift", "planning", "export"),
    "experiments": (*_BELOW_EXPORT, "project", "drift", "planning", "export", "preflight"),
    "search": (
        *(*_BELOW_EXPORT, "drift", "planning", "export", "preflight"),
        "experiments",
    ),
    "replay": (*RING_0, "drift", "reports", "training", "export"),
    "stages": (*_BELOW_EXPORT, "drift", "export", "preflight"),
    "serving": (*RING_0, "drift", "predictor"),
    "loop": (
        *(*_BELOW_EXPORT, "drift", "planning", "export", "preflight"),
        *("experiments", "predictor", "serving"),
    ),
    "curation": (*RING_0, "data", "experiments", "serving", "loop"),
    "cli": (
        *(*_BELOW_EXPORT, "export", "project", "inference", "preflight"),
        *("experiments", "search", "serving", "loop", "curation"),
    ),
}


def in_order(*rooms: str) -> Table:
    """A table in which each room may import all rooms before it."""
    return {room: rooms[:place] for place, room in enumerate(rooms)}


# Inside the rooms that are divided.
DATA = in_order(
    *(
        "engine",
        "sources",
        "rules",
        "store",
        "augmentation",
        "splits",
        "images",
        "tables",
        "texts",
        "merge",
        "erasure",
    )
)
TRAINING = in_order(
    *(
        "targets",
        "networks",
        "distributed",
        "augmentation",
        "batches",
        "recipe",
        "module",
        "checkpoints",
    ),
    *(
        "job",
        "frozen_features",
        "assembly",
        "telemetry",
        "short_run",
        "trees",
        "uncertainty",
        "ensembles",
        "pruning",
    ),
)
EXPORT = in_order("graphs", "certification", "precision", "targets")
REPORTS = in_order("console", "evaluation", "pages")
_SERVING_LOW = ("settings", "http", "requests")
_SERVING_MIDDLE = (*_SERVING_LOW, "schemas", "models", "metrics")
_SERVING_CORE = (*_SERVING_MIDDLE, "extension", "worker", "endpoints", "app", "process")
_EXTENSIONS = (
    *("access_log", "api_docs", "auth", "engine_rebuild", "explaining", "gpu", "grpc_port"),
    *("monitoring", "open_inference", "page", "request_log", "rollout", "tracing"),
)
# Extensions use the core, never each other. The core never imports an extension.
SERVING: Table = {
    "settings": (),
    "http": ("settings",),
    "requests": ("http",),
    "schemas": _SERVING_LOW,
    "models": (*_SERVING_LOW, "schemas"),
    "metrics": (*_SERVING_LOW, "models"),
    "extension": _SERVING_MIDDLE,
    "worker": (*_SERVING_MIDDLE, "extension"),
    "endpoints": (*_SERVING_MIDDLE, "extension", "worker"),
    "app": (*_SERVING_MIDDLE, "extension", "worker", "endpoints"),
    "process": (*_SERVING_MIDDLE, "extension", "worker", "app"),
    **dict.fromkeys(_EXTENSIONS, _SERVING_CORE),
    "extensions": ("extension", *_EXTENSIONS),
    "service": (*_SERVING_CORE, "extensions"),
    "load_test": (*_SERVING_CORE, *_EXTENSIONS, "extensions"),  # a client
    "gateway": (*_SERVING_CORE, "auth", "grpc_port", "extensions"),  # a command
}
TABLES: Mapping[str, Table] = {
    "slipway": ROOMS,
    "slipway/data": DATA,
    "slipway/training": TRAINING,
    "slipway/export": EXPORT,
    "slipway/reports": REPORTS,
    "slipway/serving": SERVING,
}
# The record of an extension names the worker's type, which only a type checker resolves.
_ONLY_FOR_TYPES = "slipway/serving/extension.py -> slipway/serving/worker.py"


@dataclass(frozen=True)
class Arrow:
    """An import from one room of a divided folder into another."""

    folder: str
    source: str
    target: str
    importer: Path
    imported: Path

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}"


def upward_rows(table: Table) -> list[str]:
    """The rows that name a room which does not stand before them, as "room -> room"."""
    order = list(table)
    return [
        f"{room} -> {other}"
        for place, (room, others) in enumerate(table.items())
        for other in others
        if other not in order[:place]
    ]


def drawn_rooms(page: str) -> list[str]:
    """The rooms in the picture of CONTRIBUTING.md, from the bottom up."""
    picture = page.partition("## The rooms")[2].split("```")[1]
    lines = [re.findall(r"\b([a-z_]+)/(?=  | *$)", line) for line in picture.splitlines()]
    ring_0 = re.search(r"ring 0: (.+)", picture)
    lowest = ring_0[1].split()[::-1] if ring_0 else []
    return [*lowest, *(room for line in reversed(lines) for room in line)]


def unlisted_rooms(root: Path, folder: str) -> list[str]:
    """The rooms of a divided folder that its table lacks, and the rows without a room."""
    found = {_room(folder, path) for path in _modules(root) if _lies_in(folder, path)}
    return sorted((found - {TOP}) ^ set(TABLES[folder]))


def arrows(root: Path, folder: str) -> Iterator[Arrow]:
    """Every import between two rooms of a divided folder."""
    for importer in _modules(root):
        if not _lies_in(folder, importer):
            continue
        for imported in _imports(root, importer):
            if _lies_in(folder, imported):
                source, target = _room(folder, importer), _room(folder, imported)
                if source != target:
                    yield Arrow(folder, source, target, importer, imported)


def forbidden_arrows(root: Path, folder: str) -> list[str]:
    """The imports that the folder's table does not allow, as "file -> file"."""
    allowed = {**TABLES[folder], TOP: tuple(TABLES[folder])}
    return [
        str(arrow)
        for arrow in arrows(root, folder)
        if arrow.target not in allowed.get(arrow.source, ()) and str(arrow) != _ONLY_FOR_TYPES
    ]


def _lies_in(folder: str, path: Path) -> bool:
    """True for a module of the folder."""
    if path.as_posix() == f"{folder}/__init__.py":
        return False
    return folder in [parent.as_posix() for parent in path.parents]


def _room(folder: str, path: Path) -> str:
    inside = path.relative_to(folder)
    if len(inside.parts) > 1:
        return inside.parts[0]
    return inside.stem if inside.stem in TABLES[folder] else TOP


def _modules(root: Path) -> list[Path]:
    """All modules below `root`, relative to it."""
    return [path.relative_to(root) for path in sorted((root / "slipway").rglob("*.py"))]


def _imports(root: Path, importer: Path) -> list[Path]:
    """The modules of `root` that a module imports."""
    names = imports((root / importer).read_text())
    targets = {Path(name.replace(".", "/") + ".py") for name in names}
    return sorted(path for path in targets if path != importer and (root / path).is_file())
