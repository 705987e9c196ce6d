"""Measures CPU time per row and memory of the whole stage `clean`, on images, a table and texts.

`python -m bench.growth KIND COUNT [ENDING]` prints one line; KIND is images, table or texts. Texts
are read from a .csv, or from a .parquet or .jsonl file of the same rows.
`bench.cleaning` runs all of them. The stage is a separate process with one worker in a folder of
its own. Memory means pages that no file backs.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import simplejpeg

from bench.tables import make_table
from slipway.config.yaml_files import read_yaml
from slipway.config.yaml_text import yaml_text
from slipway.data.images.quality import THUMBNAIL_PX
from tests.project_params import of_kind

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("images", "table", "texts")
COUNTS = (10_000, 100_000, 300_000, 1_000_000)
_FEWEST = 1_000  # rows; their time and memory, mostly of imports, are subtracted
_BATCH_ROWS = 1 << 12
_SECONDS_BETWEEN_LOOKS = 0.02
_TABM = {
    "num_submodels": 16,
    "num_blocks": 2,
    "width": 128,
    "dropout": 0.1,
    "embedding_size": 32,
    "num_bins": 48,
}  # arguments that init would propose; nothing is trained
_NGRAMS = {
    "buckets": 131072,
    "width": 16,
    "word_ngrams": 2,
    "byte_ngrams": [3, 4, 5, 6],
    "lowercase": True,
    "dropout": 0.0,
}  # likewise


def lines() -> Iterator[str]:
    """Yield lines of a table, one for each kind and count."""
    for kind in KINDS:
        for count in COUNTS:
            yield f"| whole clean, {count:,} rows, {kind} | {line(kind, count)} |"


def line(kind: str, count: int, ending: str = "csv") -> str:
    """Format the time and memory of one count, minus those of a few rows."""
    scratch = ROOT / "tmp"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        few, many = (_run(kind, rows, Path(name) / str(rows), ending) for rows in (_FEWEST, count))
    cpu, held = many[0] - few[0], many[1] - few[1]
    return (
        f"{1e6 * cpu / (count - _FEWEST):.1f} us of a processor a row; {held / 2**20:.0f} MiB "
        f"held at most, {held / count:.0f} bytes a row"
    )


def _run(kind: str, count: int, folder: Path, ending: str) -> tuple[float, int]:
    """Return the processor seconds of the stage, and its peak anonymous memory."""
    folder.mkdir()
    path = _rewritten(_WRITERS[kind](folder, count), ending)
    task, target = {
        "images": ("image_classification", "label"),
        "table": ("table_regression", "price"),
        "texts": ("text_classification", "label"),
    }[kind]
    params = of_kind(read_yaml(ROOT / "params.yaml"), task)
    params["data"] |= {
        "path": path.name,
        "image_column": "image",
        "target_column": target,
        "checksums": None,
    }
    params["clean"]["max_bad_fraction"] = 0.5
    if kind == "images":
        params["clean"]["num_workers"] = 1
    if kind == "table":
        params["train"] |= {"network": "tabm", "network_arguments": _TABM}
        params["evaluate"]["gates"] = {}
    if kind == "texts":
        params["data"]["text_columns"] = ["text"]
        params["train"] |= {"network": "hashed_ngrams", "network_arguments": _NGRAMS}
        params["evaluate"]["gates"] = {}
    (folder / "params.yaml").write_text(yaml_text(params))
    command = [sys.executable, "-m", "slipway.stages.clean"]
    log = folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=file,
        )
    most = 0
    while True:
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if ended:
            break
        most = max(most, _anonymous_bytes(process.pid))
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(
            f"clean of {count} rows ({kind}) ended with {process.returncode}:\n{log.read_text()}"
        )
    return usage.ru_utime + usage.ru_stime, most


def _anonymous_bytes(process: int) -> int:
    _, found, rest = Path(f"/proc/{process}/status").read_text().partition("RssAnon:")
    return int(rest.split()[0]) * 1024 if found else 0


def _write_images(folder: Path, count: int) -> Path:
    """Write small grey JPEGs of coarse noise in one Parquet file."""
    path, grid = folder / "images.parquet", np.linspace(0, 5, THUMBNAIL_PX).round().astype(int)
    schema = pa.schema([("image", pa.binary()), ("label", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, count, _BATCH_ROWS):
            size = min(_BATCH_ROWS, count - begin)
            coarse = np.random.default_rng(begin).integers(0, 256, (size, 6, 6, 1), dtype=np.uint8)
            pixels = np.ascontiguousarray(coarse[:, grid][:, :, grid])
            payloads = [
                simplejpeg.encode_jpeg(each, quality=80, colorspace="GRAY") for each in pixels
            ]
            writer.write_table(
                pa.table([payloads, [str(index % 10) for index in range(size)]], schema=schema)
            )
    return path


def _write_table(folder: Path, count: int) -> Path:
    """Write the table of `bench.tables`, in pieces."""
    path, schema = folder / "table.csv", make_table(10).schema
    with pyarrow.csv.CSVWriter(
        path, schema, write_options=pyarrow.csv.WriteOptions(quoting_style="none")
    ) as writer:
        for begin in range(0, count, 100_000):
            writer.write_table(make_table(min(100_000, count - begin), seed=begin))
    return path


def _write_texts(folder: Path, count: int) -> Path:
    """Write sentences of 12 rare words; 5 % have an e-mail, 2 % nearly equal the one before."""
    path, before = folder / "texts.csv", ""
    with path.open("w") as file:
        file.write("label,text\n")
        for begin in range(0, count, _BATCH_ROWS):
            size = min(_BATCH_ROWS, count - begin)
            for row, words in enumerate(
                np.random.default_rng(begin).integers(0, 1 << 20, (size, 12)), begin
            ):
                text = " ".join(f"{word:x}" for word in words)
                if row % 20 == 7:
                    text += f" from {row}@example.org"
                if row % 50 == 9:
                    text = f"{before} again"
                file.write(f"{'ab'[row % 2]},{text}\n")
                before = text
    return path


def _rewritten(path: Path, ending: str) -> Path:
    """Write a CSV of texts again as Parquet or JSON lines."""
    found = path.with_suffix(f".{ending}")
    if path.suffix != ".csv" or found == path:
        return path
    with pyarrow.csv.open_csv(path) as batches:
        if ending == "parquet":
            with pq.ParquetWriter(found, batches.schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
        else:
            with found.open("w") as file:
                file.writelines(
                    json.dumps(row) + "\n" for each in batches for row in each.to_pylist()
                )
    path.unlink()
    return found


_WRITERS = {"images": _write_images, "table": _write_table, "texts": _write_texts}


if __name__ == "__main__":
    print(line(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
