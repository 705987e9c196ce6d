"""Which part may import which: the arrows of docs/pipeline.md, and that the service stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

from slipway.system.code_digest import reached_files
from slipway.system.source_code import imported_modules

RING_0_PARTS = {
    *("artifacts", "config", "inputs", "kinds", "metrics", "runtimes", "system", "traffic"),
}
RING_0 = {"imagecodecs", "numpy", "PIL", "pyarrow", "pydantic", "simplejpeg", "ruamel"}
RUNTIMES = {"onnxruntime", "tensorrt", "cuda"}
HEAVY = (
    "torch",
    "pytorch_lightning",
    "deepspeed",
    "timm",
    "onnx",
    "onnxruntime",
    "sklearn",
    "matplotlib",
    "dvc",
)


def part_of(root: Path, path: Path) -> str:
    """The folder of `slipway` ("system", "data", ...), "stages" or "serving"."""
    first, *rest = path.relative_to(root).parts
    if first != "slipway":
        return first
    return rest[0] if len(rest) > 1 else first


ALLOWED = {
    "system": {"system"},
    "kinds": {"system", "kinds"},
    "inputs": {"system", "kinds", "inputs"},
    "config": {"system", "kinds", "inputs", "config"},
    "artifacts": {"system", "kinds", "inputs", "artifacts"},
    "metrics": {"system", "kinds", "inputs", "artifacts", "metrics"},
    "runtimes": {"system", "kinds", "inputs", "artifacts", "runtimes"},
    "traffic": {"system", "kinds", "inputs", "config", "artifacts", "traffic"},
    "data": {*RING_0_PARTS, "data"},
    "reports": {*RING_0_PARTS, "data", "reports"},
    "training": {*RING_0_PARTS, "data", "reports", "training"},
    "planning": {*RING_0_PARTS, "data", "reports", "training", "planning"},
    "preflight": {
        *RING_0_PARTS,
        *("drift", "data", "reports", "training", "planning", "export", "preflight"),
    },
    "doctor": {*RING_0_PARTS, "data", "reports", "training", "doctor"},
    "export": {*RING_0_PARTS, "drift", "data", "reports", "training", "export"},
    "drift": {*RING_0_PARTS, "drift"},
    "replay": {*RING_0_PARTS, "drift", "reports", "training", "export", "replay"},
    "stages": {*RING_0_PARTS, "drift", "data", "reports", "training", "export", "preflight"},
    "serving": {*RING_0_PARTS, "drift", "serving"},
}


def forbidden_arrows(root: Path) -> list[str]:
    """Every import that goes against ALLOWED, as "file -> file"."""
    found = []
    for package in ("slipway", "stages", "serving"):
        for path in sorted((root / package).rglob("*.py")):
            for target in _direct_imports(root, path):
                if part_of(root, target) not in ALLOWED[part_of(root, path)]:
                    found.append(f"{path.relative_to(root)} -> {target.relative_to(root)}")
    return found


def _direct_imports(root: Path, path: Path) -> set[Path]:
    targets = (
        root / (module.replace(".", "/") + ".py") for module in imported_modules(path.read_text())
    )
    return {target for target in targets if target.is_file() and target != path}


def test_imports_follow_the_arrows(root: Path) -> None:
    assert forbidden_arrows(root) == []


def test_an_import_against_the_arrows_is_noticed(tmp_path: Path) -> None:
    for folder in ("slipway/data", "slipway/training", "stages", "serving"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "slipway" / "training" / "network.py").write_text("import torch\n")
    (tmp_path / "slipway" / "data" / "wrong.py").write_text(
        "from slipway.training import network\n"
    )
    (tmp_path / "serving" / "wrong.py").write_text("import slipway.data.wrong\n")
    assert forbidden_arrows(tmp_path) == [
        "slipway/data/wrong.py -> slipway/training/network.py",
        "serving/wrong.py -> slipway/data/wrong.py",
    ]


def test_ring_0_imports_its_few_packages_only(root: Path) -> None:
    paths = [
        path for part in sorted(RING_0_PARTS) for path in (root / "slipway" / part).rglob("*.py")
    ]
    assert len(paths) > len(RING_0_PARTS)
    for path in paths:
        outside = (
            {name.split(".")[0] for name in imported_modules(path.read_text())}
            - set(sys.stdlib_module_names)
            - {"slipway"}
        )
        allowed = RING_0 | RUNTIMES if path.parent.name == "runtimes" else RING_0
        assert outside <= allowed, path.name


def test_the_service_reaches_no_training_code(root: Path) -> None:
    reached = {path.as_posix() for path in reached_files(root, [Path("serving/service.py")])}
    assert not [
        path
        for path in reached
        if path.startswith(("slipway/data/", "slipway/training/", "slipway/export/", "stages/"))
    ]


@pytest.mark.process
def test_importing_the_service_loads_nothing_heavy(root: Path) -> None:
    code = (
        f"import sys, serving.service; print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.process
def test_importing_a_heavy_package_would_be_noticed(root: Path) -> None:
    code = f"import sys, torch, serving.service; print([name for name in {HEAVY!r} if name in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert "torch" in answer.stdout.splitlines()[-1]
