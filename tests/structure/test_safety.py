"""No file that we ship or write can execute what it loads: no pickle, no eval, no shell."""

import pickle
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.structure.dangers import artefact_dangers, code_dangers

PACKAGES = ("slipway", "transforms", "bench", "data/demo")


def test_no_file_of_ours_can_execute_what_it_loads(root: Path) -> None:
    sources = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    assert len(sources) > 100
    found = {path.relative_to(root).as_posix(): code_dangers(path.read_text()) for path in sources}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as harmless",
        "from joblib import load",
        "import joblib; joblib.load(path)",
        "importlib.import_module('pickle')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=choice)",
        "from torch import load as read\nread(\n    path,\n)",
        "LitModule.load_from_checkpoint(path)",
        "torch.jit.load(path)",
        "import yaml as y; y.load(text, Loader=loader)",
        "yaml.unsafe_load(text)",
        "yaml.full_load(text)",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.Popen(text, shell=flag)",
        "np.load(path, allow_pickle=True)",
        "pandas.read_pickle(path)",
    ],
)
def test_each_danger_in_code_would_be_noticed(source: str) -> None:
    assert code_dangers(source)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(\n    path,\n    map_location='cpu',\n    weights_only=True,\n)",
        "safetensors.torch.load(payload)",
        "model.eval()",
        "yaml.safe_load(text)",
        "np.load(path, allow_pickle=False)",
        "subprocess.run([text], shell=False)",
        "# eval(text), import pickle\n'torch.load(path)'",
    ],
)
def test_what_is_harmless_is_not(source: str) -> None:
    assert code_dangers(source) == []


def plant(folder: Path) -> None:
    """One file of each dangerous kind, under names that say nothing, and some harmless ones."""
    objects = np.array([{"a": 1}, None], dtype=object)
    np.save(folder / "objects", objects, allow_pickle=True)
    np.savez(folder / "arrays", numbers=np.arange(3))
    np.savez(folder / "some_objects", numbers=np.arange(3), objects=objects)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (folder / f"weights{protocol}.bin").write_bytes(
            pickle.dumps({"weight": [1.0, 2.0]}, protocol)
        )
    with zipfile.ZipFile(folder / "model.bin", "w") as archive:
        archive.writestr("model/data.pkl", pickle.dumps([1]))
    (folder / "empty.pt").write_bytes(b"")
    (folder / "labels.joblib").write_bytes(b"x")
    np.save(folder / "numbers", np.arange(6.0), allow_pickle=False)
    (folder / "bundle.json").write_text('{"labels": ["N.", "]"]}\n')
    (folder / "notes.txt").write_text("N. B.: nothing here.\n")
    (folder / "page.html").write_text("<!doctype html>\n")


def test_each_danger_in_a_file_would_be_noticed_and_what_is_harmless_is_not(tmp_path: Path) -> None:
    plant(tmp_path)
    pickles = {f"weights{protocol}.bin" for protocol in range(pickle.HIGHEST_PROTOCOL + 1)}
    assert set(artefact_dangers(tmp_path)) == {
        "objects.npy",
        "some_objects.npz",
        "model.bin",
        "empty.pt",
        "labels.joblib",
        *pickles,
    }


def test_no_artefact_of_a_stage_is_committed(root: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert [
        path
        for path in tracked
        if path.startswith(("artifacts/", "data/packed/", ".venv/", ".work/"))
    ] == []
