"""Finds code and files that could execute what they load: by syntax tree, and by their bytes.

A name in a comment or a string is harmless; an alias (`from torch import load as read`) is
dangerous. What a library does internally is out of reach.
"""

import ast
import io
import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.structure.syntax import nodes

MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "torch.jit.load",
}
METHODS = {
    "load_from_checkpoint",
    "read_pickle",
    "to_pickle",
}  # whatever they are called on: these unpickle
SUFFIXES = {".pkl", ".pickle", ".joblib", ".pt", ".pth", ".ckpt"}
_ZIP, _GZIP = (
    b"PK\x03\x04",
    b"\x1f\x8b",
)  # torch.save and numpy.savez write the one, joblib the other
_FEW_OPERATIONS = 2  # a text may begin with a byte or two that pickle knows


def code_dangers(source: str) -> list[str]:
    """Each forbidden import and call, as written."""
    names = dict(_imported(source))
    modules = [
        target
        for target in names.values()
        if any(target == module or target.startswith(f"{module}.") for module in MODULES)
    ]
    calls = [node for node in nodes(source) if isinstance(node, ast.Call)]
    return modules + [ast.unparse(call) for call in calls if _is_dangerous(call, names)]


def _imported(source: str) -> Iterator[tuple[str, str]]:
    """(name in this file, what it is) of every import."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name, alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_dangerous(call: ast.Call, names: dict[str, str]) -> bool:
    function = _full_name(call.func, names)
    given = {keyword.arg: getattr(keyword.value, "value", keyword) for keyword in call.keywords}
    if function == "torch.load":
        return given.get("weights_only") is not True
    if function in ("importlib.import_module", "__import__"):
        return any(getattr(argument, "value", None) in MODULES for argument in call.args)
    if function in CALLS or function.rpartition(".")[2] in METHODS:
        return True
    return given.get("shell", False) is not False or given.get("allow_pickle", False) is not False


def _full_name(function: ast.expr, names: dict[str, str]) -> str:
    """`y.load` after `import yaml as y` -> "yaml.load"; "" for what is no dotted name."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.insert(0, function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ".".join(["", *parts])  # a method of what some expression gives
    return ".".join([names.get(function.id, function.id), *parts])


def file_dangers(path: Path) -> str | None:
    """Why nobody should load this file, or None."""
    payload = path.read_bytes()
    if path.suffix in SUFFIXES:
        return f"{path.suffix} is what pickles are called"
    if payload.startswith(_ZIP):
        return _archive_danger(payload)
    if payload.startswith(_GZIP):
        return "compressed, as joblib writes"
    if payload.startswith(b"\x93NUMPY"):
        return _array_danger(payload)
    return "a pickle" if _is_pickle(payload) else None


def _archive_danger(payload: bytes) -> str | None:
    """None for what `np.savez` writes: arrays and nothing else."""
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        members = [archive.read(name) for name in archive.namelist() if name.endswith(".npy")]
        if not members or len(members) < len(archive.namelist()):
            return "a zip archive, as torch.save writes"
    return next((danger for danger in map(_array_danger, members) if danger), None)


def _array_danger(payload: bytes) -> str | None:
    try:
        np.load(io.BytesIO(payload), allow_pickle=False)
    except ValueError as error:
        return f"an array that cannot be read without pickle: {error}"
    return None


def _is_pickle(payload: bytes) -> bool:
    """True if unpickling would run from the first byte to STOP, under any protocol."""
    num_operations = 0
    try:
        for _ in pickletools.genops(payload):
            num_operations += 1
    except Exception:  # its own kinds for what is no pickle are many
        return False
    return num_operations > _FEW_OPERATIONS


def artefact_dangers(root: Path) -> dict[str, str]:
    """By path, what is dangerous below `root`."""
    found = {
        path.relative_to(root).as_posix(): file_dangers(path)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
    return {path: danger for path, danger in found.items() if danger}
