"""Reads every raw image, or a table, once, and writes down what is kept, what is refused, and why."""

from functools import partial
from pathlib import Path

from slipway.config.command import run_stage
from slipway.config.params import Params
from slipway.config.sections import DataParams
from slipway.data.engine.progress import progress
from slipway.data.engine.rows import QUARANTINE, ROWS, write_table
from slipway.data.images import cleaning
from slipway.data.images.report import image_report
from slipway.data.rules.report import CleanReport, to_json
from slipway.data.sources import sources
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.checksums import read_checksums
from slipway.data.sources.raw_tables import read_raw_table
from slipway.data.tables.cleaning import clean_table
from slipway.data.tables.files import TableColumns, write_cells
from slipway.data.tables.report import column_notes, conflict_hint, table_report
from slipway.data.tables.source import find_table
from slipway.kinds.registry import is_table
from slipway.reports.pages.clean_page import Pictures, clean_page
from slipway.reports.pages.clean_pictures import pictures_of
from slipway.system import files
from slipway.system.errors import DataError

CLEAN = Path("data/clean")
REPORT = Path("reports/clean.json")
PAGE = Path("reports/clean.html")
COLUMNS = Path("reports/columns.yaml")
REFUSED = Path(".work/clean/quarantine.parquet")  # stays for the user when the stage fails
TRIED_COLUMNS = Path(".work/clean/columns.yaml")  # likewise
NO_COLUMNS = "{} # images have no columns\n"


def run(params: Params) -> None:
    """Clean `data.path`; DataError when too much of it is bad, with all of that in `.work/clean/quarantine.parquet`."""
    limits = ArchiveLimits(params.clean.max_archive_members, params.clean.max_archive_ratio)
    data, layout = sources.with_given_split(unpacked(params.data, limits))
    (_run_table if is_table(data.task) else _run_images)(params, data, layout)


def _run_table(params: Params, data: DataParams, layout: sources.Layout) -> None:
    if data.checksums:
        read_checksums(Path(data.checksums), Path(data.path)).check_table(find_table(data))
    table = clean_table(read_raw_table(find_table(data)), data, params.clean)
    print(layout.described(table.cleaned.rows), end="")
    try:
        _check(table.cleaned, params)
    except DataError as error:
        files.write_text(TRIED_COLUMNS, table.columns_yaml)
        raise DataError(
            f"{error}{conflict_hint(table)}{column_notes(table, TRIED_COLUMNS.as_posix())}"
        ) from error
    with files.new_directory(CLEAN) as folder:
        _write_rows(folder, table.cleaned)
        write_cells(
            folder,
            table.cells,
            TableColumns(inputs=table.types, ignored=table.ignored),
            table.ledger.bad_cell_table(),
        )
    _report(table_report(table, data, params.clean), {}, table.columns_yaml)
    print(table.cleaned.summary(REPORT, PAGE) + column_notes(table, COLUMNS.as_posix()))


def _run_images(params: Params, data: DataParams, layout: sources.Layout) -> None:
    digests = read_checksums(Path(data.checksums), Path(data.path)) if data.checksums else None
    num_workers, engine = params.clean.num_workers, data.engine
    read = partial(
        sources.read_samples, data, read_files=engine == "ray"
    )  # a worker elsewhere has no files
    batches = cleaning.clean_samples(read(), params.clean, num_workers, data.classes, engine)
    inspected = progress(
        batches, "clean", sources.count_samples(data), lambda batch: batch.num_rows
    )
    cleaned = cleaning.compare_samples(
        inspected,
        params.clean,
        data.task,
        lambda wanted: cleaning.digest_pixels(read(wanted), params.clean, num_workers, engine),
        digests,
    )
    print(layout.described(cleaned.rows), end="")
    _check(cleaned, params)
    with files.new_directory(CLEAN) as folder:
        _write_rows(folder, cleaned)
    report = image_report(cleaned, params.clean, data)
    _report(report, pictures_of(report, data, params.clean.max_pixels), NO_COLUMNS)
    print(cleaned.summary(REPORT, PAGE))


def _check(cleaned: cleaning.Cleaned, params: Params) -> None:
    try:
        cleaning.check_usable(cleaned, params.clean, params.data.task)
    except DataError as error:
        write_table(REFUSED, cleaned.quarantine, QUARANTINE)
        raise DataError(f"{error}\nEvery refused sample is in {REFUSED}.") from error
    REFUSED.unlink(missing_ok=True)


def _write_rows(folder: Path, cleaned: cleaning.Cleaned) -> None:
    write_table(folder / "rows.parquet", cleaned.rows, ROWS)
    write_table(folder / "quarantine.parquet", cleaned.quarantine, QUARANTINE)


def _report(report: CleanReport, pictures: Pictures, columns: str) -> None:
    files.write_json(REPORT, to_json(report))
    files.write_text(PAGE, clean_page(report, pictures))
    files.write_text(COLUMNS, columns)


if __name__ == "__main__":
    run_stage(run)
