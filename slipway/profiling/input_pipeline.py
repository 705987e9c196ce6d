"""Profiles the stage `precompute`: the time per image from the raw file to the packed store.

The parts are reading, decoding, the user's transform and resizing. Some rows are measured one after
the other, as in one worker. The time for all rows is computed from these: one process reads, and
the workers do the rest. Workers compete for cores while they compute, but not while they wait.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from slipway.config.params import Params
from slipway.data.engine.rows import SPLIT_ROWS, read_table
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.samples import RawSample
from slipway.data.sources.sources import read_samples
from slipway.data.store.store_form import store_form
from slipway.inputs import user_function
from slipway.inputs.images import ImageContract, decode_image, image_array, load_transform
from slipway.system.contract import Contract
from slipway.system.cores import num_cores
from slipway.system.errors import DataError, SlipwayError

_MAX_ROWS = 64
_NUM_WORKERS = (1, 2, 4, 8, 16)
_WORTH_IT = 1.05  # smallest speed-up that justifies more workers
Result = TypeVar("Result")


class RawTimes(Contract):
    """Milliseconds per image for each part, averaged over `rows` images."""

    rows: int
    read_ms: float
    decode_ms: float
    transform_ms: float  # 0 without a transform
    resize_ms: float
    processor_ms: float  # time for decoding, the transform and resizing together

    @property
    def worker_ms(self) -> float:
        """Milliseconds that a worker needs for one image, by the wall clock."""
        return self.decode_ms + self.transform_ms + self.resize_ms

    @property
    def largest(self) -> str:
        """Return the name of the slowest part: "read", "decode", "transform" or "resize"."""
        parts = {
            "read": self.read_ms,
            "decode": self.decode_ms,
            "transform": self.transform_ms,
            "resize": self.resize_ms,
        }
        return max(parts, key=lambda name: parts[name])

    def image_ms(self, num_workers: int, num_cores: int) -> float:
        """Return the expected milliseconds per image for a number of workers and cores."""
        if num_workers == 1:
            return self.read_ms + self.worker_ms
        return max(self.read_ms, self.worker_ms / num_workers, self.processor_ms / num_cores)

    def best_num_workers(self, num_cores: int) -> int:
        """Return the smallest number of workers whose time per image is close to the best."""
        times = {
            number: self.image_ms(number, num_cores)
            for number in sorted({*_NUM_WORKERS, num_cores})
        }
        return next(
            number for number, found in times.items() if found <= min(times.values()) * _WORTH_IT
        )


class InputPipelineProfile(Contract):
    """Times of a sample of raw images, and the best number of worker processes for `precompute`."""

    num_workers: int  # current number of workers of precompute
    times: RawTimes | None = None  # null if they could not be measured
    note: str = ""
    num_images: int = 0
    expected_seconds: float = 0.0
    better_num_workers: int | None = None  # null if the current number is as good
    better_seconds: float = 0.0


def profile_input_pipeline(params: Params, root: Path) -> InputPipelineProfile:
    """Time a sample of the raw images. If they cannot be read, the profile's note says why."""
    num_workers = params.precompute.num_workers
    try:
        rows = read_table(root / "data/split/rows.parquet", SPLIT_ROWS)
        step = max(1, rows.num_rows // _MAX_ROWS)
        sources = rows["source"].to_pylist()[::step][:_MAX_ROWS]
        samples = read_samples(unpacked(params.data, ArchiveLimits.of(params.clean)), sources)
        contract = store_form(params.precompute, params.clean.max_pixels).network
        times = time_raw_rows(samples, contract)
    except SlipwayError as error:
        return InputPipelineProfile(num_workers=num_workers, note=f"not measured: {error}")
    cores = num_cores()
    best = times.best_num_workers(cores)
    expected, better = (
        times.image_ms(workers, cores) * rows.num_rows / 1000
        for workers in (num_workers or cores, best)
    )
    return InputPipelineProfile(
        num_workers=num_workers,
        times=times,
        num_images=rows.num_rows,
        expected_seconds=expected,
        better_num_workers=best if expected / better > _WORTH_IT else None,
        better_seconds=better,
    )


def time_raw_rows(samples: Iterable[RawSample], contract: ImageContract) -> RawTimes:
    """Time the parts of loading raw images. Raises DataError if there are none."""
    load_transform(contract)
    totals = dict.fromkeys(("read", "decode", "transform", "resize"), 0.0)
    processor, count, begin = 0.0, 0, time.perf_counter()
    for sample in samples:
        totals["read"] += time.perf_counter() - begin
        processor_begin = time.process_time()
        image = _timed(totals, "decode", partial(decode_image, sample.payload, contract.max_pixels))
        if contract.transform is not None:
            function, sha256 = contract.transform.function, contract.transform.sha256
            image, _ = _timed(
                totals, "transform", partial(user_function.run, function, sha256, image)
            )
        _timed(totals, "resize", partial(image_array, image, contract))
        processor += time.process_time() - processor_begin
        count, begin = count + 1, time.perf_counter()
    if not count:
        raise DataError(
            "no split has an image whose decoding could be timed, expected one. Run "
            "`dvc repro split`."
        )
    each = {f"{name}_ms": seconds / count * 1000 for name, seconds in totals.items()}
    return RawTimes(rows=count, processor_ms=processor / count * 1000, **each)


def _timed(totals: dict[str, float], name: str, action: Callable[[], Result]) -> Result:
    begin = time.perf_counter()
    result = action()
    totals[name] += time.perf_counter() - begin
    return result
