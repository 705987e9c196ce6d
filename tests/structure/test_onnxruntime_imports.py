"""Every import of onnxruntime comes after its telemetry is switched off."""

import ast
from pathlib import Path

from tests.structure.syntax import imports

DOOR = "slipway/runtimes/onnx_runtime.py"
# The second one is for scripts that are exported, and so import nothing of Slipway.
DOORS = (
    "import_onnxruntime()",
    "os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')",
)


def unguarded_imports(root: Path) -> list[str]:
    """Lines (file:line) that import onnxruntime before a call of DOORS."""
    found = []
    for path in sorted((root / "slipway").rglob("*.py")):
        name, source = path.relative_to(root).as_posix(), path.read_text()
        if "onnxruntime" not in source:
            continue
        tree = ast.parse(source)
        functions = [
            list(ast.walk(node)) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        ]
        scopes: list[list[ast.AST]] = [list(tree.body), *functions]
        for statements in scopes if name != DOOR else []:
            imports = [
                node.lineno
                for node in statements
                if isinstance(node, ast.stmt) and "onnxruntime" in _packages(node)
            ]
            doors = [
                node.lineno
                for node in statements
                if isinstance(node, ast.Call) and ast.unparse(node) in DOORS
            ]
            found += [
                f"{name}:{line}" for line in imports if not any(door < line for door in doors)
            ]
    return found


def _packages(node: ast.stmt) -> set[str]:
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return set()
    return {module.split(".")[0] for module in imports(ast.unparse(node))}


def test_onnxruntime_is_imported_only_after_its_telemetry_is_off(root: Path) -> None:
    assert unguarded_imports(root) == []


def test_an_import_of_onnxruntime_with_telemetry_on_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "slipway").mkdir()
    (tmp_path / "slipway" / "late.py").write_text(
        "def right():\n    import_onnxruntime()\n    from onnxruntime.quantization import x\n"
        "def wrong():\n    from onnxruntime.quantization import x\n    import_onnxruntime()\n"
    )
    assert unguarded_imports(tmp_path) == ["slipway/late.py:5"]
