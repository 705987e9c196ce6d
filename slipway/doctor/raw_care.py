"""The doctor's look at the data before the packed store: what `precompute` waits for, and how many workers it should have."""

from pathlib import Path

from slipway.config.params import Params
from slipway.data.engine.rows import SPLIT_ROWS, read_table
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.sources import read_samples
from slipway.data.store.raw_times import WORTH_IT, time_raw_rows
from slipway.data.store.store_form import store_form
from slipway.doctor.diagnosis import RawCare
from slipway.system.cores import num_cores
from slipway.system.errors import SlipwayError

_MOST_ROWS = 64


def look_at_raw_data(params: Params, root: Path) -> RawCare:
    """Time some of the raw images; where they cannot be read, the reason instead."""
    try:
        rows = read_table(root / "data/split/rows.parquet", SPLIT_ROWS)
        data = unpacked(
            params.data,
            ArchiveLimits(params.clean.max_archive_members, params.clean.max_archive_ratio),
        )
        step = max(1, rows.num_rows // _MOST_ROWS)
        sources = rows["source"].to_pylist()[::step][:_MOST_ROWS]
        times = time_raw_rows(
            read_samples(data, sources),
            store_form(params.precompute, params.clean.max_pixels).network,
        )
    except SlipwayError as error:
        return RawCare(
            times=None,
            note=f"not measured: {error}",
            num_images=0,
            num_workers=params.precompute.num_workers,
            expected_seconds=0.0,
            better_num_workers=None,
            better_seconds=0.0,
        )
    cores = num_cores()
    number = params.precompute.num_workers or cores
    best = times.best_num_workers(cores)
    present, better = (
        times.image_ms(workers, cores) * rows.num_rows / 1000 for workers in (number, best)
    )
    return RawCare(
        times=times,
        note="",
        num_images=rows.num_rows,
        num_workers=params.precompute.num_workers,
        expected_seconds=present,
        better_num_workers=best if present / better > WORTH_IT else None,
        better_seconds=better,
    )
