"""Allowed imports inside slipway/serving/: extensions use the core, never each other.

The core never imports an extension.
"""

from pathlib import Path

from tests.structure.syntax import imports

EXTENSIONS = {
    "access_log", "api_docs", "auth", "engine_rebuild", "explaining", "gpu", "grpc_port",
    "monitoring", "open_inference", "page", "request_log", "rollout", "tracing",
}  # fmt: skip
LOW = {"settings", "http", "requests"}
MIDDLE = {*LOW, "schemas", "models", "metrics"}
CORE = {*MIDDLE, "extension", "worker", "endpoints", "app", "process"}
ALLOWED = {
    "settings": set[str](),
    "http": {"settings"},
    "requests": {"http"},
    "schemas": LOW,
    "models": {*LOW, "schemas"},
    "metrics": {*LOW, "models"},
    "extension": MIDDLE,
    "worker": {*MIDDLE, "extension"},
    "endpoints": {*MIDDLE, "extension", "worker"},
    "app": {*MIDDLE, "extension", "worker", "endpoints"},
    "process": {*MIDDLE, "extension", "worker", "app"},
    **dict.fromkeys(EXTENSIONS, CORE),
    "extensions": {"extension", *EXTENSIONS},
    "service": {*CORE, "extensions"},
    "load_test": {*CORE, *EXTENSIONS, "extensions"},  # a client, which nothing imports
    "gateway": {*CORE, "auth", "extensions"},  # a command, which nothing imports
}
# The record of an extension names the worker's type, which a type checker alone resolves.
ONLY_FOR_TYPES = ("slipway/serving/extension.py", "worker")


def room_of(path: Path) -> str:
    """The folder of slipway/serving/ that holds a file, or the name of a file directly in it."""
    return path.parts[2] if len(path.parts) > 3 else path.stem


def forbidden_arrows(root: Path) -> list[str]:
    """Every import inside slipway/serving/ that goes against ALLOWED, as "file -> room"."""
    found = []
    for path in sorted((root / "slipway/serving").rglob("*.py")):
        file = path.relative_to(root)
        room = room_of(file)
        targets = {
            module.split(".")[2]
            for module in imports(path.read_text())
            if module.startswith("slipway.serving.")
        }
        found += [
            f"{file} -> {target}"
            for target in sorted(targets - {room} - ALLOWED.get(room, set()))
            if target in ALLOWED and (file.as_posix(), target) != ONLY_FOR_TYPES
        ]
    return found


def test_imports_inside_serving_follow_the_table(root: Path) -> None:
    assert forbidden_arrows(root) == []


def test_an_import_against_the_table_is_reported(tmp_path: Path) -> None:
    for folder in ("http", "rollout", "monitoring"):
        (tmp_path / "slipway/serving" / folder).mkdir(parents=True)
    (tmp_path / "slipway/serving/worker.py").write_text(
        "from slipway.serving.rollout import store\n"
    )
    (tmp_path / "slipway/serving/http/routes.py").write_text("import slipway.serving.worker\n")
    (tmp_path / "slipway/serving/rollout/store.py").write_text(
        "from slipway.serving.monitoring import settings\n"
    )
    (tmp_path / "slipway/serving/monitoring/settings.py").write_text(
        "from slipway.serving import worker\n"
    )
    (tmp_path / "slipway/serving/monitoring/other.py").write_text(
        "from slipway.serving import service\n"
    )
    assert forbidden_arrows(tmp_path) == [
        "slipway/serving/http/routes.py -> worker",
        "slipway/serving/monitoring/other.py -> service",
        "slipway/serving/rollout/store.py -> monitoring",
        "slipway/serving/worker.py -> rollout",
    ]
