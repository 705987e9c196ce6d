"""The predicted time of `precompute` with more workers proves right for a slow transform."""

import statistics
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from slipway.data.engine.rows import SPLIT_ROWS
from slipway.data.sources.samples import RawSample
from slipway.data.store.packing import pack
from slipway.data.store.store_form import StoreForm
from slipway.inputs.images import ImageContract, TransformContract
from slipway.inputs.user_function import code_digest
from slipway.profiling.input_pipeline import time_raw_rows
from slipway.system import files
from tests.data.pictures import picture
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

SLOW = "import time\n\n\ndef wait(image):\n    time.sleep(0.02)\n    return image\n"
NAME = "waits_for_a_server.crop:wait"
NUM_WORKERS, NUM_ROUNDS = 4, 3
AHEAD = NUM_WORKERS * 2 * 16  # two chunks of 16 images per worker are in flight
NUM_TIMED = {1: 48, NUM_WORKERS: 192}
NUM_IMAGES = 2 * AHEAD + NUM_TIMED[NUM_WORKERS]
SAMPLES = [
    RawSample(str(number), picture(number), str(number % 2), None, None, None)
    for number in range(NUM_IMAGES)
]


def _rows(count: int) -> pa.Table:
    nothing = dict.fromkeys(SPLIT_ROWS.names)
    facts = []
    for number, sample in enumerate(SAMPLES[:count]):
        sha256 = files.sha256_bytes(sample.payload)
        known = {
            "id": sha256[:32],
            "source": sample.source,
            "label": sample.label,
            "sha256": sha256,
            "bytes": len(sample.payload),
        }
        split = ("train", "train", "train", "train", "val", "val", "test", "test")[number % 8]
        facts.append(
            nothing | known | {"flags": [], "corrections": [], "leaked": False, "split": split}
        )
    return pa.Table.from_pylist(facts, schema=SPLIT_ROWS)


def _read(wanted: Collection[str]) -> Iterator[RawSample]:
    return (sample for sample in SAMPLES if sample.source in wanted)


def _seconds(form: StoreForm, work: Path, num_workers: int) -> float:
    """Return the seconds per image while all workers are busy, without start and end."""
    work.mkdir(parents=True)
    ahead, timed = (AHEAD if num_workers > 1 else 1), NUM_TIMED[num_workers]
    rows = _rows(2 * ahead + timed)
    moments = [
        time.perf_counter()
        for _ in pack(_read, rows, form, "image_classification", work, num_workers)
    ]
    return (moments[ahead + timed - 1] - moments[ahead - 1]) / timed


@pytest.mark.nightly
def test_the_predicted_gain_of_more_workers_comes_true(
    tmp_path: Path, write_functions: WriteFunctions
) -> None:
    write_functions("waits_for_a_server", {"__init__.py": "", "crop.py": SLOW})
    transform = TransformContract(function=NAME, sha256=code_digest(NAME))
    contract = ImageContract(
        kind="images",
        transform=transform,
        size_px=8,
        channels=3,
        resize_mode="stretch",
        interpolation="bilinear",
        max_pixels=10_000,
    )
    form = StoreForm(network=contract, train_size_px=8, encoding="raw", jpeg_quality=None)
    times = time_raw_rows(SAMPLES[:64], contract)
    assert times.largest == "transform"
    assert times.best_num_workers(2) > 2
    expected = times.image_ms(1, 2) / times.image_ms(NUM_WORKERS, 2)
    gains = []
    for number in range(NUM_ROUNDS):
        alone, together = (
            _seconds(form, tmp_path / f"{number}-{workers}", workers)
            for workers in (1, NUM_WORKERS)
        )
        gains.append(alone / together)
    print(
        f"expected {expected:.2f}, measured {statistics.median(gains):.2f} "
        f"({min(gains):.2f} to {max(gains):.2f})"
    )
    assert abs(statistics.median(gains) / expected - 1) < 0.25
