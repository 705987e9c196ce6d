"""Reads every raw image once, and writes down which are kept, which are refused, and why."""

from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path

import pyarrow as pa
from slipway.reports.clean_page import clean_page
from slipway.reports.clean_pictures import pictures_of

from slipway import files
from slipway.command import run_stage
from slipway.data import cleaning, sources
from slipway.data.clean_report import to_json
from slipway.data.digests import read_digests
from slipway.data.image_report import image_report
from slipway.data.progress import progress
from slipway.data.rows import QUARANTINE, ROWS, write_table
from slipway.errors import DataError
from slipway.params import Params

CLEAN = Path("data/clean")
REPORT = Path("reports/clean.json")
PAGE = Path("reports/clean.html")
REFUSED = Path(".work/clean/quarantine.parquet")  # stays for the user when the stage fails


def run(params: Params) -> None:
    """Clean `data.path`; DataError when too much of it is bad, with all of that in `.work/clean/quarantine.parquet`."""
    data = params.data
    digests = read_digests(Path(data.digests), Path(data.path)) if data.digests else None
    samples = sources.read_samples(data, read_files=False)
    batches = cleaning.clean_samples(samples, params.clean, params.clean.num_workers, data.classes)
    inspected: list[pa.RecordBatch] = []
    for _ in progress(_each_sample(batches, inspected), "clean", sources.count_samples(data)):
        pass
    cleaned = cleaning.collect(inspected, params.clean, data.task, digests)
    try:
        cleaning.check_usable(cleaned, params.clean, data.task)
    except DataError as error:
        write_table(REFUSED, cleaned.quarantine, QUARANTINE)
        raise DataError(f"{error}\nEvery refused sample is in {REFUSED}.") from error
    REFUSED.unlink(missing_ok=True)
    with files.new_directory(CLEAN) as folder:
        write_table(folder / "rows.parquet", cleaned.rows, ROWS)
        write_table(folder / "quarantine.parquet", cleaned.quarantine, QUARANTINE)
    report = image_report(cleaned, params.clean, data)
    files.write_json(REPORT, to_json(report))
    files.write_text(PAGE, clean_page(report, pictures_of(report, data, params.clean.max_pixels)))
    print(f"read {cleaned.num_read}, kept {cleaned.rows.num_rows}, bad {cleaned.num_bad}, see {REPORT} and {PAGE}")


def _each_sample(batches: Iterable[pa.RecordBatch], inspected: list[pa.RecordBatch]) -> Iterator[None]:
    """Keep the batches; an item for each sample, for the progress bar."""
    for batch in batches:
        inspected.append(batch)
        yield from repeat(None, batch.num_rows)


if __name__ == "__main__":
    run_stage(run)
