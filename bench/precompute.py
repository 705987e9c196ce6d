"""Compares `precompute` with pure decoding, and measures the cost of JPEG stores and of a kill.

`python -m bench.precompute` makes 400x300 JPEGs like photographs, packs them at 224 px in turns
with plain decoding, on all cores, and prints and writes two tables.
"""

import io
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image, ImageFilter

from bench.conditions import conditions
from slipway.data.engine.parallel import ordered_map
from slipway.data.engine.rows import SPLIT_ROWS
from slipway.data.sources.samples import RawSample
from slipway.data.store.image_conversion import finished_shards, places_of
from slipway.data.store.jpeg_inputs import decode_jpeg, encode_jpeg
from slipway.data.store.packing import pack
from slipway.data.store.store_form import StoreForm
from slipway.inputs.images import ImageContract, array_from_bytes, decode_image
from slipway.system import files

ROOT = Path.cwd()
SCRATCH = ROOT / "tmp" / "bench" / "precompute"
RESULT = ROOT / "bench/results/precompute.md"
NUM_IMAGES, NUM_DISTINCT, NUM_ROUNDS = 1500, 200, 5
MAX_PIXELS = 10**6
NETWORK = ImageContract(
    kind="images",
    transform=None,
    size_px=224,
    channels=3,
    resize_mode="crop",
    interpolation="bilinear",
    max_pixels=MAX_PIXELS,
)
RAW = StoreForm(network=NETWORK, train_size_px=224, encoding="raw", jpeg_quality=None)
JPEG = StoreForm(network=NETWORK, train_size_px=224, encoding="jpeg", jpeg_quality=95)


def photograph(seed: int) -> bytes:
    """Make a JPEG of 400x300 with the smooth areas, edges and noise of a photograph."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize(
        (400, 300), Image.Resampling.BICUBIC
    )
    fine = Image.fromarray(generator.integers(0, 256, (75, 100, 3), dtype=np.uint8)).resize(
        (400, 300), Image.Resampling.BICUBIC
    )
    noise = Image.fromarray(generator.integers(0, 256, (300, 400, 3), dtype=np.uint8)).filter(
        ImageFilter.GaussianBlur(1)
    )
    image = Image.blend(Image.blend(coarse, fine, 0.15), noise, 0.08)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90)
    return stream.getvalue()


def data_set() -> tuple[list[RawSample], pa.Table]:
    """Return the samples and their rows; a number after each JPEG makes all digests different."""
    distinct = [photograph(seed) for seed in range(NUM_DISTINCT)]
    payloads = [
        distinct[index % NUM_DISTINCT] + index.to_bytes(4, "big") for index in range(NUM_IMAGES)
    ]
    samples = [
        RawSample(str(index), payload, str(index % 10), None, None, None)
        for index, payload in enumerate(payloads)
    ]
    return samples, pa.Table.from_pylist(
        [_row(sample, index) for index, sample in enumerate(samples)], schema=SPLIT_ROWS
    )


def _row(sample: RawSample, index: int) -> dict[str, object]:
    sha256 = files.sha256_bytes(sample.payload)
    facts = {
        "width": 400,
        "height": 300,
        "bytes": len(sample.payload),
        "sha256": sha256,
        "flags": [],
        "corrections": [],
        "leaked": False,
    }
    split = ("train",) * 7 + ("val", "test", "train")
    return {
        "id": sha256[:32],
        "source": sample.source,
        "label": sample.label,
        **facts,
        "split": split[index % 10],
    }


def decode(sample: RawSample) -> int:
    """Decode a sample only."""
    return decode_image(sample.payload, MAX_PIXELS).width


def decode_and_resize(sample: RawSample) -> int:
    """Decode and resize a sample: the minimum work of precompute."""
    return len(array_from_bytes(sample.payload, NETWORK))


def map_all(function: Callable[[RawSample], int], samples: list[RawSample]) -> None:
    """Call a function for all samples on all cores, and drop the results."""
    for _ in ordered_map(function, samples, 0, lambda sample: len(sample.payload)):
        pass


def pack_all(
    samples: list[RawSample], rows: pa.Table, form: StoreForm, stop_after: int | None = None
) -> None:
    """Pack on all cores into SCRATCH/FORM; stop after `stop_after` images, as if killed."""

    def read(sources: Collection[str]) -> Iterator[RawSample]:
        return (sample for sample in samples if sample.source in sources)

    work = SCRATCH / form.encoding
    work.mkdir(parents=True, exist_ok=True)
    for done, _ in enumerate(pack(read, rows, form, "image_classification", work, 0)):
        if done == stop_after:
            return


def look_through(rows: pa.Table) -> None:
    """Check the finished shards, which a second run does before it packs."""
    num_rows = sum(
        len(shard.numbers)
        for _, shard in finished_shards(SCRATCH / "raw", places_of(rows.sort_by("id")), RAW)
    )
    assert num_rows == NUM_IMAGES


def seconds(work: Callable[[], None]) -> float:
    """Return the seconds that `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure_once(samples: list[RawSample], rows: pa.Table) -> dict[str, float]:
    """Return the seconds of each kind of work."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    found = {"decoding alone": seconds(lambda: map_all(decode, samples))}
    found["decoding and resizing alone"] = seconds(lambda: map_all(decode_and_resize, samples))
    found["precompute, raw"] = seconds(lambda: pack_all(samples, rows, RAW))
    found["looking through the finished shards, raw"] = seconds(lambda: look_through(rows))
    shutil.rmtree(SCRATCH)
    first = seconds(lambda: pack_all(samples, rows, RAW, NUM_IMAGES // 2))
    found["precompute, raw, stopped halfway and run again"] = first + seconds(
        lambda: pack_all(samples, rows, RAW)
    )
    shutil.rmtree(SCRATCH)
    found["precompute, jpeg 95"] = seconds(lambda: pack_all(samples, rows, JPEG))
    return found


def speed_table(rounds: list[dict[str, float]]) -> str:
    """Format the median speeds, and the medians of their ratios within each round."""
    lines = [
        (
            "| | images/s, median | lowest | highest | beside decoding alone | beside decoding "
            "and resizing alone |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for name in rounds[0]:
        speeds = [NUM_IMAGES / entry[name] for entry in rounds]
        ratios = [
            statistics.median(entry[base] / entry[name] for entry in rounds)
            for base in list(rounds[0])[:2]
        ]
        lines.append(
            f"| {name} | {statistics.median(speeds):,.0f} | {min(speeds):,.0f} | "
            f"{max(speeds):,.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |"
        )
    return "\n".join(lines)


def loss_table(samples: list[RawSample]) -> str:
    """Format the bytes and errors of JPEG by quality."""
    images = [array_from_bytes(sample.payload, NETWORK) for sample in samples[:NUM_DISTINCT]]
    lines = [
        (
            "| jpeg_quality | bytes/pixel | share of raw | mean error, grey levels | largest "
            "error, mean over images |"
        ),
        "|---|---|---|---|---|",
    ]
    for quality in (75, 90, 95, 100):
        jpegs = [encode_jpeg(image, quality) for image in images]
        errors = [
            np.abs(decode_jpeg(jpeg, NETWORK.shape).astype(int) - image)
            for jpeg, image in zip(jpegs, images, strict=True)
        ]
        size = sum(map(len, jpegs)) / len(jpegs) / 224**2
        mean, largest = (
            statistics.fmean(float(function(error)) for error in errors)
            for function in (np.mean, np.max)
        )
        lines.append(f"| {quality} | {size:.2f} | {size / 3:.2f} | {mean:.2f} | {largest:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all rounds in turns, and write both tables."""
    samples, rows = data_set()
    rounds = []
    for _ in range(NUM_ROUNDS):
        rounds.append(measure_once(samples, rows))
        print({name: round(value, 2) for name, value in rounds[-1].items()}, flush=True)
    shutil.rmtree(SCRATCH)
    text = f"{speed_table(rounds)}\n\n{loss_table(samples)}"
    print(text)
    note = (
        f"{NUM_IMAGES:,} JPEGs of 400x300 to 224 px, n = {NUM_ROUNDS} rounds in turns, starting "
        "the workers included. Synthetic pictures."
    )
    versions = conditions("pillow", "simplejpeg", "numpy")
    files.write_text(RESULT, f"# Precompute\n\n{text}\n\n{note}\n{versions}\n")


if __name__ == "__main__":
    main()
