"""Imports follow the tables of `rooms`, and the service stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

from slipway.kinds.code_digest import reached_files
from tests.structure.rooms import (
    RING_0,
    ROOMS,
    TABLES,
    drawn_rooms,
    forbidden_arrows,
    unlisted_rooms,
    upward_rows,
)
from tests.structure.syntax import imports

PACKAGES_OF_RING_0 = {
    *("imagecodecs", "numpy", "pi_heif", "PIL", "pyarrow", "pydantic", "simplejpeg", "ruamel"),
    "tokenizers",  # only on use, for models that read tokens
    "psycopg",  # only on use, for SLIPWAY_DATABASE_URL
    *("cryptography", "model_signing"),  # only on use, for SLIPWAY_SIGNERS and signed releases
}
RUNTIMES = {"onnxruntime", "tensorrt", "cuda"}
HEAVY = (
    "torch",
    "pytorch_lightning",
    "deepspeed",
    "transformers",
    "peft",
    "timm",
    "onnx",
    "onnxruntime",
    "sklearn",
    "matplotlib",
    "dvc",
)


@pytest.mark.parametrize("folder", TABLES)
def test_tables_name_earlier_rows_only(folder: str) -> None:
    assert upward_rows(TABLES[folder]) == []


def test_a_row_that_names_a_later_one_is_reported() -> None:
    assert upward_rows({"low": ("high",), "high": ("low", "high")}) == [
        "low -> high",
        "high -> high",
    ]


def test_the_picture_of_the_rooms_has_each_of_them_above_those_that_it_imports(root: Path) -> None:
    drawn = drawn_rooms((root / "CONTRIBUTING.md").read_text())
    assert sorted(drawn) == sorted(ROOMS)
    assert upward_rows({room: ROOMS[room] for room in drawn}) == []


def test_a_room_that_the_picture_lacks_or_has_too_low_is_reported(root: Path) -> None:
    page = (root / "CONTRIBUTING.md").read_text()
    assert set(ROOMS) - set(drawn_rooms(page.replace("replay/ ", "        "))) == {"replay"}
    turned = page.replace("stages/ ", "data/ ").replace("   data/ ", "   stages/ ")
    drawn = drawn_rooms(turned)
    assert "stages -> training" in upward_rows({room: ROOMS[room] for room in drawn})


@pytest.mark.parametrize("folder", TABLES)
def test_each_room_has_a_row_in_the_table_of_its_folder(root: Path, folder: str) -> None:
    assert unlisted_rooms(root, folder) == [], (
        "add, rename or remove rows of tests/structure/rooms.py"
    )


@pytest.mark.parametrize("folder", TABLES)
def test_imports_follow_the_arrows(root: Path, folder: str) -> None:
    assert forbidden_arrows(root, folder) == []


def test_an_import_that_the_table_of_rooms_does_not_allow_is_reported(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        {
            "slipway/training/networks/network.py": "import torch\n",
            "slipway/training/run.py": "from slipway.training.networks import network\n",
            "slipway/training/networks/wrong.py": "import slipway.training.run\n",
            "slipway/training/networks/wrong_too.py": "import slipway.training.pruning.fine_tune\n",
            "slipway/training/pruning/fine_tune.py": "",
            "slipway/data/wrong.py": "from slipway.training import run\n",
            "slipway/serving/wrong.py": "import slipway.data.wrong\n",
        },
    )
    assert forbidden_arrows(tmp_path, "slipway") == [
        "slipway/data/wrong.py -> slipway/training/run.py",
        "slipway/serving/wrong.py -> slipway/data/wrong.py",
    ]
    assert forbidden_arrows(tmp_path, "slipway/training") == [
        "slipway/training/networks/wrong.py -> slipway/training/run.py",
        "slipway/training/networks/wrong_too.py -> slipway/training/pruning/fine_tune.py",
    ]


def test_an_extension_that_imports_another_or_that_the_core_imports_is_reported(
    tmp_path: Path,
) -> None:
    write_modules(
        tmp_path,
        {
            "slipway/serving/worker.py": "from slipway.serving.rollout import store\n",
            "slipway/serving/service.py": "from slipway.serving import extensions\n",
            "slipway/serving/extensions.py": "import slipway.serving.rollout.store\n",
            "slipway/serving/http/routes.py": "import slipway.serving.worker\n",
            "slipway/serving/rollout/store.py": "from slipway.serving.monitoring import settings\n",
            "slipway/serving/monitoring/settings.py": "from slipway.serving import worker\n",
            "slipway/serving/monitoring/other.py": "from slipway.serving import service\n",
        },
    )
    assert forbidden_arrows(tmp_path, "slipway/serving") == [
        "slipway/serving/http/routes.py -> slipway/serving/worker.py",
        "slipway/serving/monitoring/other.py -> slipway/serving/service.py",
        "slipway/serving/rollout/store.py -> slipway/serving/monitoring/settings.py",
        "slipway/serving/worker.py -> slipway/serving/rollout/store.py",
    ]


@pytest.mark.parametrize("folder", TABLES)
def test_a_room_without_a_row_and_a_row_without_a_room_are_reported(
    tmp_path: Path, folder: str
) -> None:
    gone, *rooms = TABLES[folder]
    write_modules(tmp_path, {f"{folder}/{room}/a.py": "" for room in (*rooms, "attic")})
    assert unlisted_rooms(tmp_path, folder) == sorted(["attic", gone])


def write_modules(root: Path, modules: dict[str, str]) -> None:
    for path, source in modules.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(source)


def test_ring_0_imports_its_few_packages_only(root: Path) -> None:
    paths = [path for room in RING_0 for path in (root / "slipway" / room).rglob("*.py")]
    assert len(paths) > len(RING_0)
    for path in paths:
        outside = (
            {name.split(".")[0] for name in imports(path.read_text())}
            - set(sys.stdlib_module_names)
            - {"slipway"}
        )
        allowed = PACKAGES_OF_RING_0 | (RUNTIMES if path.parent.name == "runtimes" else set())
        assert outside <= allowed, path.name


def test_the_product_reads_and_writes_yaml_with_one_library(root: Path) -> None:
    """PyYAML reads 1e-3 as text and off as false; DVC and `slipway.config` do not."""
    paths = [path for folder in ("slipway", "bench") for path in (root / folder).rglob("*.py")]
    assert len(paths) > 500
    assert [path for path in paths if "yaml" in imports(path.read_text())] == []


def test_the_service_reaches_no_training_code(root: Path) -> None:
    reached = {
        path.as_posix() for path in reached_files(root, [Path("slipway/serving/service.py")])
    }
    assert not [
        path
        for path in reached
        if path.startswith(
            ("slipway/data/", "slipway/training/", "slipway/export/", "slipway/stages/")
        )
    ]


@pytest.mark.process
def test_importing_the_service_loads_nothing_heavy(root: Path) -> None:
    code = (
        "import sys, slipway.serving.service; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.process
def test_a_heavy_package_in_the_service_is_reported(root: Path) -> None:
    code = (
        "import sys, torch, slipway.serving.service; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert "torch" in answer.stdout.splitlines()[-1]
