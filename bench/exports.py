"""Exports a project to every place that needs no server, and measures each hop.

`python -m bench.exports PROJECT RUNTIME` writes PROJECT/artifacts/exports/ and
bench/results/exports.md. RUNTIME is the folder of onnxruntime-web.

`python -m bench.exports webgpu PROJECT RUNTIME` writes the page with WebGPU, and
bench/results/exports_webgpu.md: its two hops, and the adapter of this machine.

`python -m bench.exports jpeg FOLDER RUNTIME` lets the browser decode the JPEGs in FOLDER for a tiny
model: whole images, and tiles of the model's input size, which are not resized. It writes
bench/results/exports_jpeg.md.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from bench.conditions import conditions
from slipway.export.targets.browser.export import read_runtime, write_browser
from slipway.export.targets.edge.export import EDGE, OPENVINO, write_script
from slipway.export.targets.exported import ExportRecord, megabytes, read_source
from slipway.export.targets.triton.export import REPOSITORY, ServerExport, write_server
from slipway.system import files
from tests.export.targets.sources import image_source
from tests.export.targets.triton.nvidia_server import PACKAGES, install_server, nvidia_server
from tests.serving.bundles import CONTRACT

RESULTS = Path(__file__).parent / "results"
HEAD = "| Place | Variant | Rows | Largest difference | Flipped | ms/row | Folder | Installed |"
MOST_JPEGS = 100


def exported(runtime: Path) -> Iterator[tuple[Path, ExportRecord]]:
    """Write each export of the project in the working directory."""
    root = Path("artifacts/exports")
    for variant in ("fp32", "int8"):
        source = read_source(variant)
        out = root / f"browser_{variant}"
        yield out, write_browser(out, source, read_runtime(runtime))
        for target in (EDGE, OPENVINO):
            out = root / f"{target.name}_{variant}"
            yield out, write_script(out, source, target)


def exported_with_webgpu(runtime: Path) -> Iterator[tuple[Path, ExportRecord]]:
    """Write the page with WebGPU; give each of its hops as an export."""
    for variant in ("fp32", "int8"):
        out = Path("artifacts/exports") / f"browser_webgpu_{variant}"
        web = read_runtime(runtime, has_webgpu=True)
        record = write_browser(out, read_source(variant), web)
        for hop in (record.hop, *record.more_hops):
            yield out, record.model_copy(update={"hop": hop})


def exported_to_triton() -> Iterator[tuple[Path, ExportRecord]]:
    """Write the repository of each variant, and certify it by NVIDIA's own server."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "server"
        packages = install_server(folder)
        for variant in ("fp32", "int8"):
            source, out = read_source(variant), Path("artifacts/exports") / f"triton_{variant}"
            write_server(out, source, ServerExport("triton", "digits", "", None))
            repository = (out / REPOSITORY).absolute()
            with nvidia_server(folder, packages, [repository], ["digits"]) as address:
                yield out, write_server(out, source, ServerExport("triton", "digits", "", address))


def line(out: Path, record: ExportRecord) -> str:
    """Format one export as a row of the table."""
    installed = record.facts.get("installed_mb")
    hop = record.hop
    cells = [
        hop.name,
        record.variant,
        f"{hop.rows} {hop.status}",
        f"{hop.max_difference:.1e}",
        str(len(hop.flipped)),
        f"{hop.latency_ms:.2f}",
        f"{megabytes(out):.1f} MB",
        f"{installed:.0f} MB" if installed else "",
    ]
    return f"| {' | '.join(cells)} |"


def tiles_of(payload: bytes) -> list[bytes]:
    """Return the middle of a photograph as JPEGs of the model's input size.

    There is one for each of two chroma samplings.
    """
    photograph = Image.open(io.BytesIO(payload)).convert("RGB")
    left, top, size = photograph.width // 2, photograph.height // 2, CONTRACT.size_px
    tile = photograph.crop((left, top, left + size, top + size))
    found = []
    for subsampling in ("4:2:0", "4:4:4"):
        stream = io.BytesIO()
        tile.save(stream, "JPEG", quality=85, subsampling=subsampling)
        found.append(stream.getvalue())
    return found


def measure_jpegs(folder: Path, runtime: Path) -> str:
    """Let the browser decode JPEGs; describe its differences from Slipway's decoder."""
    whole = [path.read_bytes() for path in sorted(folder.rglob("*.jpg"))[:MOST_JPEGS]]
    tiles = [tile for payload in whole for tile in tiles_of(payload)]
    lines = []
    for name, payloads in (("whole, resized", whole), ("tiles, not resized", tiles)):
        with tempfile.TemporaryDirectory() as scratch:
            source = image_source(Path(scratch) / "model", payloads)
            record = write_browser(Path(scratch) / "page", source, read_runtime(runtime))
        jpeg = record.facts["jpeg"]
        cells = (name, jpeg["rows"], jpeg["rows_that_differ"], f"{jpeg['max_levels']:g}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    head = "| JPEGs | Decoded | Differ | By at most, of 255 |\n|---|---|---|---|"
    return "\n".join(["# JPEGs in the browser, against Slipway's decoder", "", head, *lines])


def main() -> None:
    """Measure the exports and write the results."""
    runtime = Path(sys.argv[-1]).absolute()
    packages = ("onnxruntime-gpu", "numpy", "pillow")
    if sys.argv[1] == "triton":
        with contextlib.chdir(sys.argv[2]):
            lines = [line(out, record) for out, record in exported_to_triton()]
        title = f"# Exports of the digits of the demo, in NVIDIA's Triton server ({PACKAGES[0]})"
        name, text = "exports_triton", "\n".join([title, "", HEAD, "|---" * 8 + "|", *lines])
    elif sys.argv[1] == "webgpu":
        with contextlib.chdir(sys.argv[2]):
            found = list(exported_with_webgpu(runtime))
            lines = [line(out, record) for out, record in found]
        adapter = found[0][1].facts["webgpu"]["adapter"]
        title = f"# Exports of the digits of the demo with WebGPU, by the adapter {adapter}"
        name, text = "exports_webgpu", "\n".join([title, "", HEAD, "|---" * 8 + "|", *lines])
    elif sys.argv[1] == "jpeg":
        name, text = "exports_jpeg", measure_jpegs(Path(sys.argv[2]), runtime)
    else:
        with contextlib.chdir(sys.argv[1]):
            lines = [line(out, record) for out, record in exported(runtime)]
        title = "# Exports of the digits of the demo, each with its hop"
        name, text = "exports", "\n".join([title, "", HEAD, "|---" * 8 + "|", *lines])
    files.write_text(RESULTS / f"{name}.md", f"{text}\n\n{conditions(*packages)}\n")
    print(text)


if __name__ == "__main__":
    main()
