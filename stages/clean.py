"""Reads every raw image once, and writes down which are kept, which are refused, and why."""

from pathlib import Path

from slipway import files
from slipway.command import run_stage
from slipway.data import cleaning, sources
from slipway.data.archives import ArchiveLimits, unpacked
from slipway.data.progress import progress
from slipway.data.rows import QUARANTINE, ROWS, write_table
from slipway.errors import DataError
from slipway.params import Params

CLEAN = Path("data/clean")
REPORT = Path("reports/clean.json")
REFUSED = Path(".work/clean/quarantine.parquet")  # stays for the user when the stage fails


def run(params: Params) -> None:
    """Clean `data.path`; DataError when too much of it is bad, with all of that in `.work/clean/quarantine.parquet`."""
    data = unpacked(params.data, ArchiveLimits(params.clean.max_archive_members, params.clean.max_archive_ratio))
    samples = sources.read_samples(data)
    inspected = cleaning.clean_samples(samples, params.clean, num_workers=0)
    cleaned = cleaning.collect(progress(inspected, "clean", sources.count_samples(data)))
    try:
        cleaning.check_usable(cleaned, params.clean, params.data.task)
    except DataError as error:
        write_table(REFUSED, cleaned.quarantine, QUARANTINE)
        raise DataError(f"{error}\nEvery refused sample is in {REFUSED}.") from error
    REFUSED.unlink(missing_ok=True)
    with files.new_directory(CLEAN) as folder:
        write_table(folder / "rows.parquet", cleaned.rows, ROWS)
        write_table(folder / "quarantine.parquet", cleaned.quarantine, QUARANTINE)
    files.write_json(REPORT, cleaning.report(cleaned, params.data.task))
    print(f"read {cleaned.num_read}, kept {cleaned.rows.num_rows}, bad {cleaned.num_bad}, see {REPORT}")


if __name__ == "__main__":
    run_stage(run)
