"""Nothing that executes what it loads: no pickle, no eval, no shell, in any file of ours."""

import re
import subprocess
from pathlib import Path

FORBIDDEN = [
    re.compile(r"^\s*(import|from)\s+(pickle|cloudpickle|dill|joblib|shelve|marshal)\b", re.MULTILINE),
    re.compile(r"(?<!safetensors\.)\btorch\.load\((?!.*weights_only=True)"),
    re.compile(r"\byaml\.(unsafe_)?load\("),
    re.compile(r"(?<![\w.])(eval|exec)\("),
    re.compile(r"shell=True"),
    re.compile(r"allow_pickle=True"),
]


def dangers(source: str) -> list[str]:
    """The forbidden calls in a source text."""
    return [match.group(0).strip() for pattern in FORBIDDEN for match in pattern.finditer(source)]


def test_no_file_of_ours_can_execute_what_it_loads(root: Path) -> None:
    found = {
        path.relative_to(root).as_posix(): dangers(path.read_text())
        for package in ("slipway", "stages", "serving")
        for path in (root / package).rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_each_danger_would_be_noticed() -> None:
    for line in (
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "yaml.load(text)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=True)",
    ):
        assert dangers(line), line
    assert dangers("torch.load(path, weights_only=True); model.eval(); yaml.safe_load(text)") == []


def test_no_artefact_of_a_stage_is_committed(root: Path) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [path for path in tracked if path.startswith(("artifacts/", "data/packed/", ".venv/", ".work/"))] == []
