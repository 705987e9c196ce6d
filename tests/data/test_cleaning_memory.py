"""Measures the anonymous memory of `clean` per additional image, text or row of a table.

It does not grow with the number of images or texts, and for a table only by about the size of its
file. Each measurement is a separate process that cleans fewer rows, then more rows, and compares
the peaks.
"""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from slipway.data.engine import scratch
from slipway.data.images.cleaning import compare_samples
from slipway.data.images.inspection import FACTS
from slipway.data.texts.cleaning import clean_texts
from tests.data.raw_files import cleaned, data_params
from tests.project_params import PROJECT, clean_params

COUNTS = {
    "images": (80_000, 240_000),
    "table": (80_000, 240_000),
    "texts": (240_000, 480_000),  # more than pyarrow's threads read ahead, about 10 MB
}
ROWS_OF_A_BATCH = 4096
MOST_BYTES = {
    "images": 60,
    "table": 450,
    "texts": 40,
}  # a row; a table's or text's has 70 to 80 in the file. A few MB, 30 bytes a row, are chance.


def facts(count: int) -> Iterator[pa.RecordBatch]:
    """Return facts of dissimilar pictures, a tenth of which are flagged."""
    for begin in range(0, count, ROWS_OF_A_BATCH):
        size = min(ROWS_OF_A_BATCH, count - begin)
        random = np.random.default_rng(begin)
        coarse = random.integers(0, 256, (size, 8, 8), dtype=np.uint8)
        flags = [["blurred"] * (row % 10 == 0) for row in range(size)]
        columns = {
            "source": [f"{row}.jpg" for row in range(begin, begin + size)],
            "label": ["a", "b"] * (size // 2),
            "corrections": [[]] * size,
            "flags": flags,
            "flag_details": flags,
            "width": [400] * size,
            "height": [300] * size,
            "bytes": [35_000] * size,
            "sha256": [
                row.tobytes() for row in random.integers(0, 256, (size, 32), dtype=np.uint8)
            ],
            "thumbnail": [row.tobytes() for row in coarse.repeat(2, axis=1).repeat(2, axis=2)],
        }
        arrays = [pa.array(columns.get(field.name, [None] * size), field.type) for field in FACTS]
        yield pa.RecordBatch.from_arrays(arrays, schema=FACTS)


def clean_images(count: int) -> None:
    compare_samples(facts(count), clean_params(), "image_classification", lambda _: iter(()))


def clean_csv(count: int) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder) / "table.csv"
        with path.open("w") as file:
            file.write(",".join([*(f"number_{index}" for index in range(9)), "target"]) + "\n")
            for begin in range(0, count, ROWS_OF_A_BATCH):
                size = min(ROWS_OF_A_BATCH, count - begin)
                np.savetxt(
                    file, np.random.default_rng(begin).normal(50, 10, (size, 10)), "%.4f", ","
                )
        cleaned(data_params(path))


def clean_sentences(count: int) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder) / "texts.csv"
        with path.open("w") as file:
            file.write("label,text\n")
            random = np.random.default_rng(1)
            text = ""
            for row in range(count):
                if row % 50 == 9:  # nearly the text before
                    text += " again"
                else:
                    text = " ".join(f"{word:x}" for word in random.integers(0, 1 << 20, 12))
                if row % 20 == 7:
                    text += f" from {row}@example.org"
                file.write(f"{'ab'[row % 2]},{text}\n")
        own = {"path": str(path), "task": "text_classification", "text_columns": ["text"]}
        clean_texts(PROJECT.data.model_copy(update=own), clean_params())


def tell(kind: str, place: str) -> None:
    """Print the bytes per additional row, with arrays in files or, for the control, in memory."""
    # Low enough that the arrays of both counts are in files.
    scratch._SMALLEST_FILE_BYTES = 1 << 60 if place == "memory" else 1 << 14
    work = {"images": clean_images, "table": clean_csv, "texts": clean_sentences}[kind]
    counts = COUNTS[kind]
    peak(work, counts[0])  # the heap grows in the first run
    fewer, more = (peak(work, count) for count in counts)
    print((more - fewer) / (counts[1] - counts[0]))


def peak(work: Callable[[int], None], count: int) -> int:
    """Return the peak of anonymous memory while `work` runs for `count` rows."""
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(
                most,
                int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024,
            )

    sampler = threading.Thread(target=watch, daemon=True)
    sampler.start()
    work(count)
    done.set()
    sampler.join()
    return most


@pytest.mark.nightly(seconds=60)
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to see memory")
@pytest.mark.parametrize("kind", ["images", "table", "texts"])
def test_the_memory_of_clean_does_not_grow_with_the_number_of_rows(
    kind: str, tmp_path: Path, root: Path
) -> None:
    def bytes_a_row(place: str) -> float:
        command = [
            sys.executable,
            "-c",
            f"from tests.data.test_cleaning_memory import tell; tell({kind!r}, {place!r})",
        ]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout)

    assert bytes_a_row("file") < MOST_BYTES[kind]
    assert bytes_a_row("memory") > MOST_BYTES[kind], "the twin"
    assert [path for path in (tmp_path / ".work").rglob("*") if path.is_file()] == [], (
        "nothing is left"
    )
