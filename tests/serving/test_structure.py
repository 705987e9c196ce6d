"""What must stay true of the service's process and of its seam with BentoML."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import bentoml
import pytest

from tests.serving.server import ROOT

OUTER = ("slipway.data", "slipway.training", "slipway.export")
HEAVY = ("torch", "onnx", "onnxruntime", "pytorch_lightning", "deepspeed", "timm", "dvc", *OUTER)


def heavy_after(statement: str) -> list[str]:
    """Which heavy packages a fresh interpreter has after `statement`."""
    script = f"{statement}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_importing_the_service_imports_nothing_heavy() -> None:
    assert heavy_after("import serving.service") == []


def test_twin_a_heavy_import_is_seen() -> None:
    assert heavy_after("import serving.service, onnx") == ["onnx"]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def beyond_ring_zero(names: set[str]) -> set[str]:
    forbidden = (*OUTER, "stages", "torch", "onnx")
    return {name for name in names if name.startswith(tuple(f"{one}." for one in forbidden)) or name in forbidden}


@pytest.mark.parametrize("path", sorted(Path("serving").glob("*.py")), ids=str)
def test_the_service_imports_ring_zero_only(path: Path) -> None:
    assert beyond_ring_zero(imported(path)) == set()


def test_twin_an_import_beyond_ring_zero_is_seen(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("from slipway import training\nimport slipway.data.rows\n")
    assert beyond_ring_zero(imported(tmp_path / "bad.py")) == {"slipway.training", "slipway.data.rows"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_seam_with_bentoml_is_where_we_found_it() -> None:
    """What serving/service.py takes from BentoML beyond its documented interface; a new version has to be looked at."""
    from _bentoml_impl.worker import service as worker
    from _bentoml_sdk.service import Service
    from bentoml._internal.configuration.containers import BentoMLContainer

    assert bentoml.__version__ == "1.4.39"
    assert "service_class" in inspect.signature(bentoml.service).parameters
    assert list(inspect.signature(Service.to_asgi).parameters) == ["self", "is_main"]
    assert isinstance(inspect.getattr_static(Service, "doc"), property)
    assert "service.to_asgi(" in inspect.getsource(worker)
    assert "http" not in inspect.signature(worker.main.callback).parameters  # so uvicorn takes its protocol "auto", which is ours
    assert all(hasattr(BentoMLContainer, name) for name in ("http", "bentoml_home"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_our_front_is_the_outermost_application_and_absent_behind_another_service() -> None:
    script = """
import serving.service as service
from serving.front import Front
print(type(service.Slipway.to_asgi()) is Front, type(service.Slipway.to_asgi(is_main=False)) is Front)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
