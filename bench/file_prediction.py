"""Compares `slipway.predict_files` with the bare runtime, on images or texts.

`python -m bench.file_prediction` predicts a folder of JPEGs by resnet18 at 224 px. In turns, the
bare runtime runs the same network on arrays in memory. The table is
bench/results/file_prediction.md. With the argument `texts` it predicts a CSV of messages by a
transformer, and the bare runtime also tokenises them; the table is file_prediction_texts.md. The
bare runtime has the batch size that is fastest for it. Both may use every core.
"""

import csv
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import slipway
from bench.conditions import conditions
from bench.serving_models import messages, write_large, write_text
from bench.serving_speed import photograph
from slipway.artifacts.bundle import LoadedBundle
from slipway.inference.local import LoadedModel, certified_model
from slipway.inputs.texts import TextContract, encode_texts, read_text
from slipway.system import files

NUM_ROWS = 320
NUM_ROUNDS = 7
BATCH_SIZES = (1, 4, 16, 32, 64)
RESULTS = Path(__file__).parent / "results"
Rows = Callable[[LoadedModel, int, int], NDArray[Any]]  # network inputs of a range of the source


@dataclass(frozen=True)
class Case:
    """A model, the source that it predicts, and the inputs of the bare runtime."""

    title: str
    write: Callable[[Path], LoadedBundle]
    write_source: Callable[[Path], Path]  # into a folder; returns the path of the source
    rows: Rows
    note: str
    result: str
    packages: tuple[str, ...]


def bare_rate(case: Case, model: LoadedModel, num_rows: int, batch_size: int) -> float:
    """Return rows per second of the runtime alone, over the first rows."""
    started = perf_counter()
    for begin in range(0, num_rows, batch_size):
        certified_model(model).run(case.rows(model, begin, min(begin + batch_size, num_rows)))
    return num_rows / (perf_counter() - started)


def file_rate(model: LoadedModel, source: Path, destination: Path) -> float:
    """Return rows per second from the source to a CSV of answers."""
    done = slipway.predict_files(model, source, destination, overwrite=True)
    assert (done.rows, done.answered) == (NUM_ROWS, NUM_ROWS)
    return done.rows / done.seconds


def write_photographs(folder: Path) -> Path:
    """Write a folder of JPEGs."""
    folder.mkdir()
    for number in range(NUM_ROWS):
        (folder / f"{number:04}.jpg").write_bytes(photograph())
    return folder


def random_pixels(model: LoadedModel, begin: int, end: int) -> NDArray[Any]:
    """Return (rows, 224, 224, 3) pixels, the same for each call."""
    return _PIXELS[begin:end]


def write_messages(folder: Path) -> Path:
    """Write a CSV of messages."""
    folder.mkdir()
    with (folder / "messages.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text"])
        writer.writerows([text] for text in messages()[:NUM_ROWS])
    return folder / "messages.csv"


def tokens(model: LoadedModel, begin: int, end: int) -> NDArray[Any]:
    """Return the tokens of messages, in rows as long as the longest."""
    contract = certified_model(model).bundle.manifest.input
    assert isinstance(contract, TextContract)
    texts = [read_text({"text": text}, contract) for text in messages()[begin:end]]
    rows = encode_texts(texts, contract)
    return np.ascontiguousarray(rows[:, : np.count_nonzero(rows, axis=1).max()])


_PIXELS = np.random.default_rng(7).integers(0, 256, (NUM_ROWS, 224, 224, 3), dtype=np.uint8)
CASES = {
    "images": Case(
        "resnet18, 224 px",
        write_large,
        write_photographs,
        random_pixels,
        "JPEGs of 224 px in a folder, answered into a CSV by `slipway.predict_files`, against the "
        "same network on arrays in memory.",
        "file_prediction.md",
        ("onnxruntime-gpu", "pillow", "simplejpeg"),
    ),
    "texts": Case(
        "a transformer on tokens",
        write_text,
        write_messages,
        tokens,
        "messages in a CSV, answered into a CSV by `slipway.predict_files`, against the same "
        "network (6 layers of 384 numbers) on the same messages in memory, with its tokenizer.",
        "file_prediction_texts.md",
        ("onnxruntime-gpu", "tokenizers"),
    ),
}


def measured(case: Case, work: Path) -> tuple[int, list[tuple[float, float]]]:
    """Return the best batch size of the bare runtime, and both rates of each round."""
    case.write(work)
    source = case.write_source(work / "source")
    with slipway.load(work / "bundle") as model:
        bare_rate(case, model, 64, 16)
        best = max(BATCH_SIZES, key=lambda size: bare_rate(case, model, 128, size))
        rounds = [
            (bare_rate(case, model, NUM_ROWS, best), file_rate(model, source, work / "out.csv"))
            for _ in range(NUM_ROUNDS)
        ]
    return best, rounds


def main() -> None:
    """Measure, print and write the table."""
    case = CASES[sys.argv[1] if len(sys.argv) > 1 else "images"]
    with tempfile.TemporaryDirectory() as name:
        best, rounds = measured(case, Path(name))
    bare, from_files = (statistics.median(rates) for rates in zip(*rounds, strict=True))
    ratios = sorted(files_rate / bare_rate for bare_rate, files_rate in rounds)
    text = f"""\
# Prediction of whole files: {case.title}

{NUM_ROWS} {case.note} {NUM_ROUNDS} rounds in turns, medians.

| | rows/s |
|---|---|
| bare ONNX Runtime, batches of {best} | {bare:.1f} |
| `predict_files` | {from_files:.1f} |

`predict_files` reaches {100 * statistics.median(ratios):.0f} % of the bare runtime
({100 * ratios[0]:.0f} to {100 * ratios[-1]:.0f} % in the rounds).

{conditions(*case.packages)}
"""
    print(text)
    files.write_text(RESULTS / case.result, text)


if __name__ == "__main__":
    main()
