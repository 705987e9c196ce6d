"""Allowed imports inside serving/: extensions use the core, the core never uses an extension, and no extension another."""

from pathlib import Path

from slipway.system.source_code import imported_modules

EXTENSIONS = {
    "auth", "engine_rebuild", "explaining", "gpu", "monitoring", "open_inference", "page", "request_log", "rollout"
}  # fmt: skip
LOW = {"settings", "http", "requests"}
MIDDLE = {*LOW, "api_docs", "models", "metrics"}
CORE = {*MIDDLE, "extension", "worker", "endpoints", "status", "app", "process"}
ALLOWED = {
    "settings": set[str](),
    "http": {"settings"},
    "requests": {"http"},
    "api_docs": LOW,
    "models": {*LOW, "api_docs"},
    "metrics": {*LOW, "models"},
    "extension": MIDDLE,
    "worker": {*MIDDLE, "extension"},
    "endpoints": {*MIDDLE, "extension", "worker", "status"},
    "status": {*MIDDLE, "extension", "worker"},
    "app": {*MIDDLE, "extension", "worker", "endpoints"},
    "process": {*MIDDLE, "extension", "worker", "app"},
    **dict.fromkeys(EXTENSIONS, CORE),
    "extensions": {"extension", *EXTENSIONS},
    "service": {*CORE, "extensions"},
    "load_test": {*CORE, *EXTENSIONS, "extensions"},  # a client, which nothing imports
}
# The record of an extension names the worker's type, which a type checker alone resolves.
ONLY_FOR_TYPES = ("serving/extension.py", "worker")


def room_of(path: Path) -> str:
    """The folder of serving/ that holds a file, or the name of a file that lies there directly."""
    return path.parts[1] if len(path.parts) > 2 else path.stem


def forbidden_arrows(root: Path) -> list[str]:
    """Every import inside serving/ that goes against ALLOWED, as "file -> room"."""
    found = []
    for path in sorted((root / "serving").rglob("*.py")):
        file = path.relative_to(root)
        room = room_of(file)
        targets = {
            module.split(".")[1]
            for module in imported_modules(path.read_text())
            if module.startswith("serving.")
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
        (tmp_path / "serving" / folder).mkdir(parents=True)
    (tmp_path / "serving/worker.py").write_text("from serving.rollout import store\n")
    (tmp_path / "serving/http/routes.py").write_text("import serving.worker\n")
    (tmp_path / "serving/rollout/store.py").write_text("from serving.monitoring import settings\n")
    (tmp_path / "serving/monitoring/settings.py").write_text("from serving import worker\n")
    (tmp_path / "serving/monitoring/other.py").write_text("from serving import service\n")
    assert forbidden_arrows(tmp_path) == [
        "serving/http/routes.py -> worker",
        "serving/monitoring/other.py -> service",
        "serving/rollout/store.py -> monitoring",
        "serving/worker.py -> rollout",
    ]
