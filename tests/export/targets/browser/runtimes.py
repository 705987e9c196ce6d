"""Provides onnxruntime-web: the files in ONNXRUNTIME_WEB, or a fake without a runtime."""

import os
from pathlib import Path

import pytest

from slipway.export.targets.browser.export import (
    SHA256,
    WEBGPU_SHA256,
    WebRuntime,
    read_runtime,
)
from slipway.export.targets.browser.hop import find_browser

VARIABLE = "ONNXRUNTIME_WEB"
CODE = (
    "/*! ONNX Runtime Web v9.9.9 */\nvar a=class{},b=class{},c={};var u=import.meta.url;\n"
    "export{a as InferenceSession,b as Tensor,c as env,u as default};\n"
    "//# sourceMappingURL=ort.wasm.bundle.min.mjs.map\n"
)
needs_browser = pytest.mark.skipif(
    find_browser() is None or VARIABLE not in os.environ,
    reason="needs Chromium (Debian: apt-get install chromium) and onnxruntime-web (npm pack "
    f"onnxruntime-web, then {VARIABLE}=ARCHIVE)",
)


def real_runtime(has_webgpu: bool = False) -> WebRuntime:
    return read_runtime(Path(os.environ[VARIABLE]), has_webgpu)


def write_stand_in(folder: Path, code: str = CODE) -> Path:
    """Write files in the layout of the package, which cannot run a model."""
    (folder / "dist").mkdir(parents=True)
    for script, binary in (SHA256, WEBGPU_SHA256):
        (folder / "dist" / script).write_text(code)
        (folder / "dist" / binary).write_bytes(b"\0asm")
    return folder
