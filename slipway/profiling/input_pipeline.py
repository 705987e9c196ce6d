"""Profiles the stage `precompute`: the time per image from the raw file to the packed store."""

from pathlib import Path

from slipway.config.params import Params
from slipway.data.engine.rows import SPLIT_ROWS, read_table
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.sources import read_samples
from slipway.data.store.raw_times import WORTH_IT, RawTimes, time_raw_rows
from slipway.data.store.store_form import store_form
from slipway.system.contract import Contract
from slipway.system.cores import num_cores
from slipway.system.errors import SlipwayError

_MAX_ROWS = 64


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
        better_num_workers=best if expected / better > WORTH_IT else None,
        better_seconds=better,
    )
