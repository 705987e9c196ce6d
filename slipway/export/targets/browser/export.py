"""Writes the page of `slipway export browser` and runs its hop.

All files are classic scripts, with model and runtime in base64, so that the page works from any
static host, and from the disk without one: browsers let no page on a disk fetch its own files. The
content security policy allows no connection at all.
"""

import base64
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from slipway.artifacts.bundle import SCORE_NAME
from slipway.artifacts.certificate import Certificate, Hop
from slipway.artifacts.golden_rows import ROUNDING
from slipway.export.certification.comparison import not_executed
from slipway.export.targets.browser.hop import WEBGPU, run_browser_hop
from slipway.export.targets.browser.texts import page_contract, unreadable_part
from slipway.export.targets.exported import (
    ExportRecord,
    ExportSource,
    exported_contract,
    megabytes,
    read_source,
    summary,
    write_export,
)
from slipway.inputs.columns import ColumnContract
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract
from slipway.runtimes.runtime import MIN_LENGTH
from slipway.system import files
from slipway.system.errors import UnavailableError

VERSION = "1.30.0"
# SHA-256 of the files that were tried.
SHA256 = {
    "ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    "ort-wasm-simd-threaded.wasm": (
        "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2"
    ),
}
# The same with WebGPU. Both files run on the CPU, too.
WEBGPU_SHA256 = {
    "ort.webgpu.bundle.min.mjs": "0730816731ce2cdfb06f273da065d4a1c7091eb9d1756a83b2916c8a89d015e2",
    "ort-wasm-simd-threaded.asyncify.wasm": (
        "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da"
    ),
}
_COMPARED_ROWS = 4  # by both runtimes, in each browser before WebGPU answers
_PAGE = package_files("slipway.export.targets.browser") / "page"
_STATIC = (
    *("index.html", "style.css", "icon.svg", "images.js", "columns.js", "texts.js"),
    *("predict.js", "app.js"),
)
_VERSION_OF = re.compile(r"ONNX Runtime Web v([\w.+-]+)")
_EXPORTS = re.compile(r"export\s*\{([^}]*)\};?\s*(//# sourceMappingURL=\S*\s*)?$")
_NEEDED = ("InferenceSession", "Tensor", "env")
_PACKAGE = f"onnxruntime-web@{VERSION}"
RunHop = Callable[[Path, ExportSource, bool], tuple[list[Hop], dict[str, Any]]]


@dataclass(frozen=True)
class WebRuntime:
    """onnxruntime-web: its code as a classic script, and its binary for WebAssembly."""

    version: str
    script: str
    wasm: bytes
    digests: dict[str, str]  # hex SHA-256 by name, of the package's files
    has_webgpu: bool = False

    @property
    def is_tried(self) -> bool:
        """True for the files with which Slipway was tested."""
        return self.digests in (SHA256, WEBGPU_SHA256)


def export_browser(
    out: Path, runtime: Path | None, variant: str | None, *, download: bool, webgpu: bool = False
) -> str:
    """Write the page to `out`; return a summary.

    `runtime` is a folder or an npm archive of onnxruntime-web. Without it, `download` fetches the
    archive with npm. With `webgpu`, the page answers by WebGPU where the browser has it.

    Raises:
        UnavailableError: no runtime, or a bundle that the page cannot carry.
        ParityError: the hop `browser` differs.
    """
    if runtime is None and not download:
        raise UnavailableError(_where_to_get("no --runtime was given"))
    source = read_source(variant)
    require_page(source)
    if runtime is not None:
        web = read_runtime(runtime, webgpu)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            web = read_runtime(_download(Path(scratch)), webgpu)
    record = write_browser(out, source, web)
    return summary(out, record, [f"now: open {out / 'index.html'} in a browser"])


def write_browser(
    out: Path,
    source: ExportSource,
    runtime: WebRuntime,
    run_hop: RunHop = run_browser_hop,
) -> ExportRecord:
    """Write the page of a certified model, run `run_hop` on it, and show the certificate on it."""

    def fill(folder: Path) -> tuple[list[Hop], dict[str, Any]]:
        write_page(folder, source, runtime)
        hops, facts = run_hop(folder, source, runtime.has_webgpu)
        hop = hops[0]
        if runtime.has_webgpu and hop.status == "not_executed":
            hops.append(not_executed(WEBGPU, source.requested("browser", "webgpu"), hop.reason))
        known = {
            "runtime": runtime.version,
            "runtime_files": runtime.digests,
            "folder_mb": megabytes(folder),
            "latency_ms": hop.latency_ms,
        }
        remark = {"remark": "another onnxruntime-web than the one that Slipway was tried with"}
        return hops, known | facts | (
            remark if hop.status == "agrees" and not runtime.is_tried else {}
        )

    def finish(folder: Path, certificate: Certificate, _: bool) -> None:
        content = json.dumps(certificate_content(source, certificate))
        files.write_text(folder / "certificate.js", f"slipway.certificate = {content};\n")

    return write_export(out, source, "browser", fill, finish)


def require_page(source: ExportSource) -> None:
    """Raise UnavailableError for a bundle that the page cannot run."""
    contract = source.bundle.manifest.input
    if isinstance(contract, ImageContract) and contract.transform is not None:
        found = f"the function {contract.transform.function} of precompute.transform"
        fix = "Train without precompute.transform"
    elif isinstance(contract, TextContract) and (part := unreadable_part(contract.tokenizer)):
        found = f"this tokenizer, for {part},"
        fix = "Train with precompute.tokenizer: bpe or null, or serve it with `slipway serve`"
    else:
        return
    raise UnavailableError(
        f"the page cannot carry {found}: it runs in Python only; expected images, a "
        f"table or texts whose preprocessing is Slipway's own. {fix}."
    )


def write_page(folder: Path, source: ExportSource, runtime: WebRuntime) -> None:
    """Write the page without its certificate."""
    for name in _STATIC:
        (folder / name).write_bytes((_PAGE / name).read_bytes())
    manifest = source.bundle.manifest
    contract = manifest.input
    content = (
        page_contract(contract)
        if isinstance(contract, TextContract)
        else exported_contract(contract)
    )
    model = {
        "version": source.bundle.version,
        "variant": source.variant,
        "contract": content,
        "min_length": MIN_LENGTH,
        "example": contract.example_row()
        if isinstance(contract, (ColumnContract, TextContract))
        else {},
        "input_name": manifest.input_name,
        "output_name": manifest.output_name,
        "score_name": SCORE_NAME,
        "labels": manifest.output.labels,
        "calibration": source.calibration.model_dump(mode="json"),
        "card": source.bundle.card(),
        "webgpu": runtime.has_webgpu,
        "onnx": base64.b64encode(source.graph()).decode(),
    }
    files.write_text(folder / "model.js", f"slipway.model = {json.dumps(model)};\n")
    files.write_text(folder / "runtime.js", runtime.script)
    wasm = base64.b64encode(runtime.wasm).decode()
    files.write_text(folder / "runtime_wasm.js", f'slipway.runtimeWasm = "{wasm}";\n')


def read_runtime(path: Path, has_webgpu: bool = False) -> WebRuntime:
    """Read onnxruntime-web from an npm archive, its folder, or a folder of the two files.

    Raises:
        UnavailableError: files are missing, of another form, or altered.
    """
    tried = WEBGPU_SHA256 if has_webgpu else SHA256
    code_file, binary = tried
    found = _read_archive(path, tried) if path.is_file() else _read_folder(path, tried)
    missing = [name for name in tried if name not in found]
    if missing:
        raise UnavailableError(_where_to_get(f"{path} has no {' and no '.join(missing)}"))
    digests = {name: files.sha256_bytes(found[name]) for name in tried}
    code = found[code_file].decode("utf-8", "replace")
    stated, exported = _VERSION_OF.search(code), _EXPORTS.search(code)
    names: dict[str, str] = {}
    for entry in exported.group(1).split(",") if exported else ():
        own, _, public = entry.strip().partition(" as ")
        names[public or own] = own
    if stated is None or exported is None or not set(_NEEDED) <= set(names):
        raise UnavailableError(_where_to_get(f"{path / code_file} is not onnxruntime-web's code"))
    if stated.group(1) == VERSION and digests != tried:
        raise UnavailableError(_where_to_get(f"the files in {path} were altered"))
    body = code[: exported.start()].replace("import.meta.url", '"https://offline.invalid/"')
    members = ", ".join(f"{name}: {names[name]}" for name in _NEEDED)
    script = f'"use strict";\n(() => {{\n{body}\nglobalThis.ort = {{ {members} }};\n}})();\n'
    return WebRuntime(stated.group(1), script, found[binary], digests, has_webgpu)


def _read_archive(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    try:
        with tarfile.open(path, "r:gz") as archive:
            return {
                Path(member.name).name: file.read()
                for member in archive
                if Path(member.name).name in names and (file := archive.extractfile(member))
            }
    except (OSError, tarfile.TarError, EOFError) as error:
        raise UnavailableError(_where_to_get(f"{path} is no npm archive ({error})")) from error


def _read_folder(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    folders = (path, path / "dist", path / "package/dist")
    return {
        name: (folder / name).read_bytes()
        for folder in folders
        for name in names
        if (folder / name).is_file()
    }


def _download(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError(_where_to_get("--download was given, but there is no npm here"))
    command = [npm, "pack", _PACKAGE, "--pack-destination", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        raise UnavailableError(
            _where_to_get(f"npm could not fetch it: {done.stderr[-300:].strip()}")
        )
    return archives[0]


def _where_to_get(found: str) -> str:
    tried = SHA256 | WEBGPU_SHA256
    listed = ", ".join(f"{name} (SHA-256 {digest})" for name, digest in tried.items())
    return (
        f"{found}; expected onnxruntime-web, tried with {VERSION}: {listed}. Get it on a machine "
        f"with npm: npm pack {_PACKAGE}, then give the archive with --runtime; or give --download "
        "to let npm do so now."
    )


def certificate_content(source: ExportSource, certificate: Certificate) -> dict[str, Any]:
    """Return the content of certificate.js: hops, verdict, and the terms of WebGPU.

    The page offers WebGPU only if its hop agrees. Before WebGPU answers, the page compares both
    runtimes on synthetic rows, because the visitor's GPU is another one.
    """
    hop, *others = certificate.hops[len(source.certificate.hops) :]
    if hop.status == "agrees":
        verdict = (
            f"Certified: this page answered all {hop.rows} test rows like the trained model, in "
            "a real browser."
        )
    else:
        verdict = f"NOT certified in a browser: {hop.reason}."
    content: dict[str, Any] = {
        "certified": hop.status == "agrees",
        "verdict": verdict,
        "hops": [
            {
                name: getattr(one, name)
                for name in ("name", "status", "rows", "max_difference", "latency_ms")
            }
            for one in certificate.hops
        ],
    }
    for webgpu in others:
        rows = source.bundle.manifest.input.example_rows(_COMPARED_ROWS)
        precision = source.model.precision
        content["webgpu"] = {
            "reason": "" if webgpu.status == "agrees" else f"its hop was not run: {webgpu.reason}",
            "rows": [base64.b64encode(row.tobytes()).decode() for row in rows],
            "max_difference": source.rows.max_difference
            if precision == "fp32"
            else ROUNDING[precision],
        }
    return content
