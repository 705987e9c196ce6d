"""Compares `slipway.predict_files` with the bare runtime, on resnet18 at 224 px.

`python -m bench.file_prediction` predicts a folder of JPEGs and runs the same network on arrays
that are in memory already, in turns, and writes bench/results/file_prediction.md. The bare runtime
has the batch size that was fastest for it. Both have every core.
"""

import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

import slipway
from bench.conditions import conditions
from bench.serving_models import write_large
from bench.serving_speed import photograph
from slipway.inference.local import LoadedModel
from slipway.system import files

NUM_IMAGES = 320
NUM_ROUNDS = 7
BATCH_SIZES = (1, 4, 16, 32, 64)
RESULT = Path(__file__).parent / "results/file_prediction.md"


def bare_rate(model: LoadedModel, images: NDArray[np.uint8], batch_size: int) -> float:
    """Return rows per second of the bare runtime, over all images."""
    started = perf_counter()
    for begin in range(0, len(images), batch_size):
        model.certified.run(images[begin : begin + batch_size])
    return len(images) / (perf_counter() - started)


def file_rate(model: LoadedModel, folder: Path, destination: Path) -> float:
    """Return rows per second from a folder of JPEGs to a CSV of answers."""
    done = slipway.predict_files(model, folder, destination, overwrite=True)
    assert (done.rows, done.answered) == (NUM_IMAGES, NUM_IMAGES)
    return done.rows / done.seconds


def measured(work: Path) -> tuple[int, list[tuple[float, float]]]:
    """Return the bare runtime's best batch size, and (bare, files) rows/s of each round."""
    write_large(work)
    folder = work / "images"
    folder.mkdir()
    for number in range(NUM_IMAGES):
        (folder / f"{number:04}.jpg").write_bytes(photograph())
    images = np.random.default_rng(7).integers(0, 256, (NUM_IMAGES, 224, 224, 3), dtype=np.uint8)
    with slipway.load(work / "bundle") as model:
        bare_rate(model, images[:64], 16)
        best = max(BATCH_SIZES, key=lambda size: bare_rate(model, images[:128], size))
        rounds = [
            (bare_rate(model, images, best), file_rate(model, folder, work / "out.csv"))
            for _ in range(NUM_ROUNDS)
        ]
    return best, rounds


def main() -> None:
    """Measure, print and write the table."""
    with tempfile.TemporaryDirectory() as name:
        best, rounds = measured(Path(name))
    bare, from_files = (statistics.median(rates) for rates in zip(*rounds, strict=True))
    ratios = sorted(files_rate / bare_rate for bare_rate, files_rate in rounds)
    text = f"""\
# Prediction of whole files: resnet18, 224 px

{NUM_IMAGES} JPEGs of 224 px in a folder, answered into a CSV by `slipway.predict_files`, against
the same network on arrays in memory. {NUM_ROUNDS} rounds in turns, medians.

| | rows/s |
|---|---|
| bare ONNX Runtime, batches of {best} | {bare:.1f} |
| `predict_files` | {from_files:.1f} |

`predict_files` reaches {100 * statistics.median(ratios):.0f} % of the bare runtime
({100 * ratios[0]:.0f} to {100 * ratios[-1]:.0f} % in the rounds).

{conditions("onnxruntime-gpu", "pillow", "simplejpeg")}
"""
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
