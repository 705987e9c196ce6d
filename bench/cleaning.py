"""Measures the speed of `clean`, the near duplicates that it finds, and its growth with the rows.

`python -m bench.cleaning CIFAR10_FOLDER IMAGES_FOLDER` makes 400x300 JPEGs from the photographs in
IMAGES_FOLDER, cleans them, and decodes the same files to RGB by the same number of processes for
comparison. `clean` decodes colour JPEGs to luma, and to colour only if there may be a copy, so it
can be faster than decoding. The command prints and writes one table. CIFAR10_FOLDER holds
train.parquet and test.parquet.

`python -m bench.cleaning --growth COUNT` is a separate process that measures memory and time for
COUNT generated records. `bench.growth` measures the whole stage.
"""

import io
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

import bench.growth
from bench.conditions import conditions
from bench.growth import COUNTS
from slipway.data.images.cleaning import clean_samples, compare_samples, digest_pixels
from slipway.data.images.inspection import FACTS
from slipway.data.images.near_duplicates import find_pairs
from slipway.data.images.quality import THUMBNAIL_PX, measure
from slipway.data.sources.sources import read_samples
from slipway.inputs.images import decode_image
from slipway.system import files
from slipway.system.cores import num_cores
from tests.project_params import PROJECT, clean_params

RESULT = Path("bench/results/cleaning.md")
NUM_FILES = 12_000
NUM_ROUNDS = 5
NUM_PLANTED = 300
CLEAN = clean_params(max_bad_fraction=1.0)


def write_photographs(sources: list[Path], folder: Path) -> list[Path]:
    """Write random, randomly mirrored crops of the photographs as JPEGs of 400x300, quality 90."""
    random = np.random.default_rng(0)
    (folder / "a").mkdir(parents=True)
    originals = [Image.open(path).convert("RGB") for path in sources]
    for number in range(NUM_FILES):
        image = originals[number % len(originals)]
        width = int(random.uniform(0.45, 0.95) * image.width)
        height = min(width * 3 // 4, image.height)
        left, top = random.integers(
            0, [image.width - width + 1, image.height - height + 1]
        ).tolist()
        part = image.resize(
            (400, 300), Image.Resampling.BICUBIC, box=(left, top, left + width, top + height)
        )
        part = (
            part.transpose(Image.Transpose(int(random.integers(0, 2))))
            if random.random() < 0.8
            else part
        )
        part.save(folder / "a" / f"{number:05}.jpg", quality=90)
    return sorted((folder / "a").iterdir())


def decode_with_turbo(paths: list[str]) -> int:
    """Decode to RGB with simplejpeg only."""
    return sum(simplejpeg.decode_jpeg(Path(path).read_bytes()).shape[0] for path in paths)


def decode_with_pillow(paths: list[str]) -> int:
    """Decode with Pillow only."""
    return sum(np.asarray(Image.open(path)).shape[0] for path in paths)


def seconds_of_pool(
    work: Callable[[list[str]], int], paths: list[Path], pool: ProcessPoolExecutor
) -> float:
    """Return the seconds in which a pool of running processes decodes all files."""
    blocks = [
        [str(path) for path in paths[begin : begin + 128]] for begin in range(0, len(paths), 128)
    ]
    begin = time.perf_counter()
    list(pool.map(work, blocks))
    return time.perf_counter() - begin


def seconds_of_clean(folder: Path) -> tuple[float, float]:
    """Return (seconds of inspecting all samples, seconds of comparing all pairs)."""
    data = PROJECT.data.model_copy(update={"path": str(folder)})

    def again(wanted: Collection[str]) -> Iterator[pa.RecordBatch]:
        return digest_pixels(read_samples(data, wanted, read_files=False), CLEAN, num_cores())

    begin = 0.0
    batches: list[pa.RecordBatch] = []
    for batch in clean_samples(read_samples(data, read_files=False), CLEAN, num_cores()):
        begin = begin or time.perf_counter()
        batches.append(batch)
    inspected = time.perf_counter()
    compare_samples(batches, CLEAN, "image_classification", again)
    share = 1 - batches[0].num_rows / sum(batch.num_rows for batch in batches)
    return (inspected - begin) / share, time.perf_counter() - inspected


def speed(folder: Path) -> list[str]:
    """Return lines of the table: images per second of clean, and of decoding only."""
    paths = sorted((folder / "a").iterdir())
    runs: dict[str, list[float]] = {"simplejpeg": [], "Pillow": [], "clean": [], "comparison": []}
    context = multiprocessing.get_context("spawn")
    for _ in range(NUM_ROUNDS):
        with ProcessPoolExecutor(num_cores(), mp_context=context) as pool:
            list(pool.map(decode_with_pillow, [[str(path)] for path in paths[: 2 * num_cores()]]))
            runs["simplejpeg"].append(seconds_of_pool(decode_with_turbo, paths, pool))
            runs["Pillow"].append(seconds_of_pool(decode_with_pillow, paths, pool))
        inspection, comparison = seconds_of_clean(folder)
        runs["clean"].append(inspection + comparison)
        runs["comparison"].append(comparison)
    ratios = [turbo / clean for turbo, clean in zip(runs["simplejpeg"], runs["clean"], strict=True)]
    pillow_ratios = [
        pillow / clean for pillow, clean in zip(runs["Pillow"], runs["clean"], strict=True)
    ]
    count = len(paths)
    return [
        *(
            f"| {name} | {rate(count, seconds)} |"
            for name, seconds in runs.items()
            if name != "comparison"
        ),
        (
            "| of clean: comparing all with all | "
            f"{1e6 * statistics.median(runs['comparison']) / count:.0f} us an image |"
        ),
        f"| clean over simplejpeg alone | {spread(ratios, '{:.0%}')} |",
        f"| clean over Pillow alone | {spread(pillow_ratios, '{:.0%}')} |",
    ]


def rate(count: int, seconds: list[float]) -> str:
    """Format images per second with the range over the rounds."""
    return spread([count / second for second in seconds], "{:,.0f}") + " images/s"


def spread(values: list[float], form: str) -> str:
    """Format the median and the range of the values."""
    return (
        f"{form.format(statistics.median(values))} ({form.format(min(values))} to "
        f"{form.format(max(values))})"
    )


def variants(image: Image.Image, random: np.random.Generator) -> Iterator[tuple[str, Image.Image]]:
    """Yield (kind of change, changed copy) of an image."""
    for quality in (30, 60, 95):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        yield f"JPEG quality {quality}", Image.open(buffer)
    for factor in (0.5, 0.75, 1.5, 2.0):
        size = (int(image.width * factor), int(image.height * factor))
        yield f"rescaled by {factor}", image.resize(size, Image.Resampling.BICUBIC)
    for crop in (0.02, 0.05):
        width, height = round(image.width * (1 - crop)), round(image.height * (1 - crop))
        left, top = random.integers(
            0, [image.width - width + 1, image.height - height + 1]
        ).tolist()
        yield (
            f"cropped by {crop:.0%} of each side",
            image.crop((left, top, left + width, top + height)),
        )
    for factor in (0.7, 0.85, 1.15, 1.3):
        yield f"brightness times {factor}", ImageEnhance.Brightness(image).enhance(factor)


def thumbnail(image: Image.Image) -> NDArray[np.uint8]:
    """Return the thumbnail (256,) as `clean` computes it."""
    return measure(np.asarray(image.convert("RGBA")))[1].ravel()


def planted(images: list[Image.Image], hay: NDArray[np.uint8]) -> dict[str, float]:
    """Return the fraction of planted copies found among the other thumbnails `hay`, by change."""
    random = np.random.default_rng(1)
    own = np.stack([thumbnail(image) for image in images])
    made: dict[str, list[NDArray[np.uint8]]] = {}
    for image in images:
        for name, changed in variants(image, random):
            made.setdefault(name, []).append(thumbnail(changed))
    twins = find_pairs(
        np.concatenate([hay, own, *(np.stack(copies) for copies in made.values())]),
        CLEAN.near_duplicate_bits,
    )
    pairs = set(map(tuple, twins.pairs.tolist()))
    shares = {}
    first = len(hay) + len(own)
    for name, copies in made.items():
        shares[name] = sum(
            (len(hay) + index, first + index) in pairs for index in range(len(copies))
        ) / len(copies)
        first += len(copies)
    return shares


def cifar(folder: Path) -> tuple[list[Image.Image], NDArray[np.int64], int]:
    """Return the images of both files, train first, their labels, and the size of train."""
    tables = [pq.read_table(folder / f"{name}.parquet") for name in ("train", "test")]
    payloads = [payload for table in tables for payload in table["image"].to_pylist()]
    images = [
        decode_image(payload["bytes"] if isinstance(payload, dict) else payload, 10_000)
        for payload in payloads
    ]
    labels = np.array([str(label) for table in tables for label in table["label"].to_pylist()])
    return images, np.unique(labels, return_inverse=True)[1], tables[0].num_rows


def near_duplicates(cifar_folder: Path, photographs: list[Path]) -> list[str]:
    """Return lines of the table: planted copies found, and pairs of CIFAR-10 with their errors."""
    images, labels, num_train = cifar(cifar_folder)
    thumbnails = np.stack([thumbnail(image) for image in images])
    pairs = find_pairs(thumbnails, CLEAN.near_duplicate_bits).pairs
    crossing = pairs[(pairs[:, 0] < num_train) & (pairs[:, 1] >= num_train)]
    strange = pairs[labels[pairs[:, 0]] != labels[pairs[:, 1]]]
    chosen = np.random.default_rng(0).choice(num_train, NUM_PLANTED, replace=False)
    small = planted([images[index] for index in chosen], np.delete(thumbnails, chosen, axis=0))
    large = planted(
        [Image.open(path).convert("RGB") for path in photographs[:NUM_PLANTED]], thumbnails
    )
    num_test = len(images) - num_train
    leaked = len(np.unique(crossing[:, 1]))
    return [
        *(
            f"| found: {name} | {large[name]:.1%} of 400x300, {small[name]:.1%} of 32x32 |"
            for name in large
        ),
        (
            f"| found: all of them | {statistics.mean(large.values()):.1%} of 400x300, "
            f"{statistics.mean(small.values()):.1%} of 32x32 |"
        ),
        (
            f"| CIFAR-10: rows in a pair | {len(np.unique(pairs)) / len(images):.2%} of "
            f"{len(images):,} |"
        ),
        (
            "| CIFAR-10: rows in a pair of two classes | "
            f"{len(np.unique(strange)) / len(images):.3%} |"
        ),
        (
            f"| CIFAR-10: test rows with a twin in train | {leaked} of {num_test:,}, "
            f"{leaked / num_test:.2%} |"
        ),
    ]


def growth() -> list[str]:
    """Return lines with CPU time and memory of comparing N records, each N in a new process."""
    lines = []
    for count in COUNTS:
        command = [sys.executable, "-m", "bench.cleaning", "--growth", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines.append(f"| comparing {count:,} with each other | {done.stdout.strip()} |")
    return lines


def growth_of(count: int) -> str:
    """Measure CPU time and anonymous memory of comparing `count` records with random thumbnails."""
    compare_samples(
        _facts(4096), CLEAN, "image_classification", lambda _: iter(())
    )  # memory that does not depend on the records
    before, most = _anonymous_bytes(), 0
    done = threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, _anonymous_bytes())

    begin = time.process_time()
    for _ in _facts(count):
        pass
    making = time.process_time() - begin
    sampler = threading.Thread(target=sample)
    sampler.start()
    begin = time.process_time()
    compare_samples(_facts(count), CLEAN, "image_classification", lambda _: iter(()))
    seconds = time.process_time() - begin - making
    done.set()
    sampler.join()
    held = max(most - before, 0)
    return (
        f"{1e6 * seconds / count:.1f} us of a processor a row; {held / 2**20:.0f} MiB held at "
        f"most, {held / count:.0f} bytes a row"
    )


def _anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def _facts(count: int) -> Iterator[pa.RecordBatch]:
    """Return facts of distinct photographs, a tenth of which look blurred."""
    grid = np.linspace(0, 5, THUMBNAIL_PX).round().astype(int)
    for begin in range(0, count, 4096):
        size = min(4096, count - begin)
        random = np.random.default_rng(begin)
        coarse = random.integers(0, 256, (size, 6, 6), dtype=np.uint8)
        blurred = [index % 10 == 0 for index in range(size)]
        known: dict[str, list[object]] = {
            "source": [f"{index % 10}/{index:08}.jpg" for index in range(begin, begin + size)],
            "label": [str(index % 10) for index in range(begin, begin + size)],
            "corrections": [[]] * size,
            "flags": [["blurred"] * each for each in blurred],
            "flag_details": [["the Laplacian's variance is 3.0"] * each for each in blurred],
            "width": [400] * size,
            "height": [300] * size,
            "bytes": [35_000] * size,
        }
        drawn = {
            "sha256": random.integers(0, 256, (size, 32), dtype=np.uint8),
            "thumbnail": coarse[:, grid][:, :, grid].reshape(size, -1),
        }
        columns = [
            _fixed(drawn[field.name])
            if field.name in drawn
            else pa.array(known.get(field.name, [None] * size), field.type)
            for field in FACTS
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=FACTS)


def _fixed(values: NDArray[np.uint8]) -> pa.Array:
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(values.shape[1]), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]
    )


def printed(lines: list[str]) -> list[str]:
    """Print the lines at once, and return them."""
    print("\n".join(lines), flush=True)
    return lines


def main() -> None:
    """Measure, print and write the table."""
    if sys.argv[1] == "--growth":
        print(growth_of(int(sys.argv[2])))
        return
    cifar_folder, sources = Path(sys.argv[1]), sorted(Path(sys.argv[2]).glob("*.jpg"))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name) / "photographs"
        photographs = write_photographs(sources, folder)
        lines = printed(speed(folder)) + printed(near_duplicates(cifar_folder, photographs))
    lines += [*printed(growth()), *(printed([line])[0] for line in bench.growth.lines())]
    text = "\n".join(
        [
            "# Cleaning images",
            "",
            "`python -m bench.cleaning CIFAR10_FOLDER IMAGES_FOLDER`.",
            (
                f"{NUM_FILES:,} JPEGs of 400x300 (crops of {len(sources)} photographs) in memory, "
                f"{num_cores()} processes."
            ),
            (
                f"Each speed is the median of {NUM_ROUNDS} interleaved rounds (smallest to "
                "largest), without the start of the processes."
            ),
            (
                "simplejpeg and Pillow decode to RGB. `clean` decodes colour JPEGs to luma, and "
                "those that may have a copy again to RGB."
            ),
            (
                "Comparing with each other: one run each, on made facts with random thumbnails, "
                "beyond what 4,096 rows left."
            ),
            (
                "Whole clean: the stage with one worker on grey JPEGs of 16x16 or a table of 10 "
                "columns, beyond what 1,000 rows took."
            ),
            "Memory is what no file backs.",
            "",
            "| what | measured |",
            "|---|---|",
            *lines,
            "",
            conditions("simplejpeg", "pillow", "numpy", "opencv-python-headless", "pyarrow"),
            "",
        ]
    )
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
