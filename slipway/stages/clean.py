"""clean: checks every raw image or row once, and records kept and refused ones with reasons."""

from collections.abc import Callable, Sequence
from pathlib import Path

from slipway.artifacts.locations import CLEAN
from slipway.config.params import Params
from slipway.config.sections import CleanParams, DataParams
from slipway.config.stage_run import run_stage
from slipway.data.engine.rows import QUARANTINE, ROWS, write_table
from slipway.data.merge.new_rows import read_recent_mark
from slipway.data.rules.report import CleanResult
from slipway.data.rules.result import check_usable
from slipway.data.sources import sources
from slipway.data.sources.archives import ArchiveLimits, archives_of, shown_as, unpacked
from slipway.data.sources.text_format import TextFormat
from slipway.data.tables.clean_files import UNLABELLED
from slipway.kinds.registry import kind_of
from slipway.reports.pages.clean_page import clean_page, pictures_of
from slipway.system import files
from slipway.system.errors import DataError

REPORT = Path("reports/clean.json")
PAGE = Path("reports/clean.html")
COLUMNS = Path("reports/columns.yaml")
REFUSED = Path(".work/clean/quarantine.parquet")  # kept for the user if the stage fails
TRIED_COLUMNS = Path(".work/clean/columns.yaml")  # likewise


def run(params: Params) -> None:
    """Clean the raw data of `data.path`.

    Raises DataError if too many samples are bad; `.work/clean/quarantine.parquet` lists them.
    """
    plain = unpacked(params.data, ArchiveLimits.of(params.clean))
    with shown_as(archives_of(params.data)):
        _clean(params, plain)


def _clean(params: Params, plain: DataParams) -> None:
    data, layout = sources.with_given_split(plain)
    kind = kind_of(data.task).input
    clean: Callable[[DataParams, CleanParams], CleanResult] = kind.load_part("clean")
    result = clean(data, params.clean)
    print(layout.described(result.cleaned.rows, TextFormat.of(params.data)), end="")
    _check(result, params)
    with files.new_directory(CLEAN) as folder:
        write_table(folder / "rows.parquet", result.cleaned.rows, ROWS)
        write_table(folder / "quarantine.parquet", result.cleaned.quarantine, QUARANTINE)
        result.write(folder)
    report = result.report()
    pictures = pictures_of(report, data, params.clean.max_pixels) if kind.has_pixels else {}
    content = report.model_dump(mode="json", exclude_none=True)
    if params.data.path and (mark := read_recent_mark(Path(params.data.path))) is not None:
        content["recent_from"] = mark  # for the drift reference of `export`
    files.write_json(REPORT, content)
    files.write_text(PAGE, clean_page(report, pictures))
    files.write_text(COLUMNS, result.columns_yaml)
    print(
        result.cleaned.summary(REPORT, PAGE)
        + _set_aside(result)
        + result.notes(COLUMNS)
        + _hints(report.hints)
    )


def _check(result: CleanResult, params: Params) -> None:
    try:
        check_usable(result.cleaned, params.clean, params.data.task)
    except DataError as error:
        write_table(REFUSED, result.cleaned.quarantine, QUARANTINE)
        files.write_text(TRIED_COLUMNS, result.columns_yaml)
        raise DataError(
            f"{error}\nEvery refused sample is in {REFUSED}.{result.hint}"
            f"{result.notes(TRIED_COLUMNS)}{_hints(result.hints)}"
        ) from error
    REFUSED.unlink(missing_ok=True)


def _set_aside(result: CleanResult) -> str:
    path = CLEAN / UNLABELLED
    if not path.exists():
        return ""
    rows = result.cleaned.num_unlabelled
    return f"\n{rows} rows without a target are set aside in {path}, for `slipway predict`"


def _hints(hints: Sequence[str]) -> str:
    return "".join(f"\nhint: {hint}" for hint in hints)


if __name__ == "__main__":
    run_stage(run)
