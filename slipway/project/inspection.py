"""Inspects a data set: its form, rows, columns and some of its images.

It reads at most about 1 GiB in at most about 30 seconds, whatever the size of the data, and reports
what it sampled. It reads files with the same code as the stages. Of an archive it unpacks some
files of each folder, and counts the files of all folders; only the stages unpack and check all.
"""

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipway.config.sections import WORKBOOK, DataParams
from slipway.data.engine.rows import SPLITS
from slipway.data.sources.archive_members import (
    CHUNK_BYTES,
    DAMAGE,
    Member,
    name_hint,
    read_members,
)
from slipway.data.sources.archives import (
    ENDINGS,
    MemberNames,
    is_archive,
    name_problem,
    only_archives,
    shown_as,
)
from slipway.data.sources.formats import excel
from slipway.data.sources.formats.json_lines import json_columns
from slipway.data.sources.image_tables import TABLE_ENDINGS, TablePart, is_table_file
from slipway.data.sources.raw_tables import RawColumn, RawTable, column_names
from slipway.data.sources.samples import is_skipped, visible_entries
from slipway.data.sources.shards import (
    PARQUET,
    is_csv,
    is_parquet,
    parquet_errors,
    table_files,
)
from slipway.data.sources.sources import find_layout
from slipway.data.sources.text_format import USUAL_FORMAT
from slipway.data.splits.split_file import SplitFile, read_split_file
from slipway.kinds.inputs import IMAGES
from slipway.kinds.registry import task_for
from slipway.kinds.targets import CLASS
from slipway.project.folder_sample import (
    IMAGE_NAME,
    payloads,
    sample_class_folders,
    sample_texts,
)
from slipway.project.image_sample import MOST_IMAGES, sample_images
from slipway.project.summary import DataSummary, ImageSample
from slipway.project.table_sample import encoding_of, holds_bytes, sample_tables, without
from slipway.system.errors import DataError

_USUAL_FRACTION = 0.9  # fraction of the cells of a column that are image names
_MOST_NAMED = 5
_MOST_GROUPS = 20  # of a Parquet file
_SPLIT_FILES = ("split", "splits")  # names of a file for data.split_file
_START_BYTES = 1 << 16  # of a CSV, for its encoding
_NOT_TABLES = (".txt", ".tsv", ".xls", ".ods", ".json", ".feather", ".h5", ".npy", ".npz")
_MOST_MEMBERS, _MOST_RATIO = 1_000_000, 200
_MOST_SECONDS = 15.0
_FILES_PER_FOLDER = 40
_MOST_BYTES = 1 << 28
_MOST_TABLE_BYTES = 1 << 27


def inspect(path: Path, sheet: str | None = None) -> DataSummary:
    """Inspect the data at `path` and describe it. Raises DataError if the data suits no task.

    `sheet` is that of a workbook: by default the first, or the only other one if that is no table.
    """
    if not path.exists():
        raise DataError(
            f"{str(path)!r} does not exist (looked in {Path.cwd()}). Name a folder with one "
            "sub-folder per class, a .csv, .parquet, .jsonl or .xlsx file, or an archive of these."
        )
    if not is_archive(path):
        return _inspect(path, lambda _, listed: listed)
    with (
        tempfile.TemporaryDirectory(prefix="slipway-") as folder,
        shown_as({Path(folder): path, Path(folder, excel.SHEET): path}),
    ):
        found = _sample_archive(path, Path(folder), sheet)

        def counted(inside: Path, _: int) -> int:
            place = PurePosixPath(inside.relative_to(found.root))
            return sum(
                number
                for name, number in found.num_files.items()
                if PurePosixPath(name).is_relative_to(place)
            )

        summary = _inspect(found.root, counted)
    is_exact = summary.is_exact and found.is_whole
    notes = (*found.notes, *summary.notes)
    return replace(summary, path=path, is_exact=is_exact, notes=notes, sheet=found.sheet)


def _inspect(root: Path, counted: Callable[[Path, int], int]) -> DataSummary:
    if not root.is_dir():
        _check_is_table(root)
        return _inspect_tables(root, [TablePart(root)])
    if sources := _joinable(root):
        summary = _inspect_tables(root, [TablePart(root / name) for name in sources])
        return replace(summary, sources=sources)
    beside = _split_file(root)
    encoding = _encoding_of_tables(root)
    own = {"encoding": encoding, "split_file": beside and str(beside.path)}
    layout = find_layout(data_params(root, **own))
    if layout.tables:
        summary = _inspect_tables(root, layout.tables)
        if beside:
            counts = Counter(beside.splits.to_pylist())
            given = {name: counts[name] for name in SPLITS if counts[name]}
            summary = replace(summary, split_file=beside.path, given=given)
        return replace(
            summary,
            notes=(*summary.notes, *layout.type_notes(USUAL_FORMAT._replace(encoding=encoding))),
        )
    _check_has_folders(root)
    found = sample_class_folders(root, layout.folders, counted)
    notes = [layout.note] if layout.note else []
    if nothing := [name for name in found.empty if name not in found.classes]:
        shown = ", ".join(nothing[:_MOST_NAMED]) + ", ..." * (len(nothing) > _MOST_NAMED)
        notes.append(f"no classes, because the folders are empty: {shown}")
    summary = DataSummary(
        path=root,
        form="text folders" if found.holds_texts else "class folders",
        num_rows=found.classes.total(),
        is_exact=found.is_exact,
        classes=dict(sorted(found.classes.items())),
        given=found.given,
        notes=tuple(notes),
    )
    if found.holds_texts:
        texts, encoding = sample_texts(found.files)
        return replace(summary, table=texts, encoding=encoding)
    return replace(summary, images=sample_images(payloads(found.files)))


def _split_file(root: Path) -> SplitFile | None:
    """Return the file split.csv beside another table, if it names the split of each row."""
    files = (Path(one.path) for one in visible_entries(root) if one.is_file())
    tables = [path for path in files if is_table_file(path.name)]
    for path in (path for path in tables if path.stem.lower() in _SPLIT_FILES and len(tables) > 1):
        with contextlib.suppress(DataError):
            return read_split_file(data_params(root, split_file=str(path)))
    return None


def data_params(path: Path, **changes: Any) -> DataParams:
    """Return a section `data` with `path` as the location of the data, and defaults."""
    return DataParams(path=str(path), task=task_for(IMAGES, CLASS)).model_copy(update=changes)


def _check_is_table(path: Path) -> None:
    if is_table_file(path.name):
        return
    what = "a text" if path.suffix.lower() in _NOT_TABLES else f"a file ending in {path.suffix!r}"
    raise DataError(
        f"{str(path)!r} is {what}, expected a folder of class folders, {TABLE_ENDINGS}, an .xlsx, "
        "or a .zip, .tar or .tar.gz of these. Save a table as .csv."
    )


def _check_has_folders(root: Path) -> None:
    entries = visible_entries(root)
    if not any(entry.is_dir() for entry in entries):
        shown = ", ".join(entry.name for entry in entries[:3]) or "no files"
        raise DataError(
            f"{str(root)!r} has no sub-folders and no table ({shown}). Sort the files into one "
            "folder per class, or add a .csv with the names of images, or texts, and their targets."
        )


def _encoding_of_tables(root: Path) -> str:
    """Guess the encoding of the CSV files at the top of a folder, whose headers are compared."""
    for path in table_files(root):
        if is_csv(path):
            with path.open("rb") as file:
                encoding = encoding_of(file.read(_START_BYTES))
            if encoding != "utf-8":
                return encoding
    return "utf-8"


def _joinable(root: Path) -> tuple[str, ...]:
    """Return the tables at the top of a folder if several have equal columns; else ().

    CSV files alone, and Parquet files, are shards of one table, which need no list.
    """
    names = [
        entry.name
        for entry in visible_entries(root)
        if entry.is_file() and is_table_file(entry.name)
    ]
    endings = {Path(name).suffix.lower() for name in names}
    if len(names) < 2 or endings == {".csv"} or endings & {*PARQUET}:
        return ()
    columns = {tuple(sorted(column_names(root / name))) for name in names}
    return tuple(names) if len(columns) == 1 else ()


# Tables -------------------------------------------------------------------------------------------


def _inspect_tables(root: Path, parts: Sequence[TablePart]) -> DataSummary:
    sample = sample_tables([part.path for part in parts])
    if not any(part.num_rows for part in sample.parts):
        raise DataError(f"{str(root)!r} has a header but no rows. Add rows.")
    column, images = _images(parts, sample.raw)
    names = [column] if column else []
    rows = [part.num_rows for part in sample.parts]
    given: Counter[str] = Counter()
    for part, number in zip(parts, rows, strict=False):
        if part.split:
            given[part.split] += number
        elif part.folders and column:
            given.update(_given_by_folders(part, sample.raw.columns[column], number))
    return DataSummary(
        path=root,
        form="table of images" if column else "table",
        num_rows=sum(rows),
        is_exact=sample.is_exact,
        given=given,
        table=without(sample.raw, names),
        image_column=column,
        images=images,
        encoding=sample.encoding,
    )


def _given_by_folders(part: TablePart, images: RawColumn, num_rows: int) -> Counter[str]:
    splits = [part.split_of(name) for name in images.values.to_pylist()]
    found = Counter(split for split in splits if split)
    return Counter({split: round(n * num_rows / len(splits)) for split, n in found.items()})


def _images(parts: Sequence[TablePart], raw: RawTable) -> tuple[str | None, ImageSample | None]:
    """Return the column that holds or names images, and a sample of them; or (None, None)."""
    first = parts[0].path
    if is_parquet(first):
        with parquet_errors(first):
            schema = pq.read_schema(first)
            names = [field.name for field in schema if holds_bytes(field.type)]
            if names:
                chosen = next((name for name in names if "im" in name.lower()), names[0])
                stored = _stored_images([part.path for part in parts], chosen)
                try:
                    return chosen, sample_images(stored)
                except DataError as error:
                    advice = f"If the column {chosen!r} holds no images, write the table without it"
                    raise DataError(f"{error} {advice}.") from error
    for name, column in raw.columns.items():
        if column.stored == "text" and _are_image_names(column.values):
            return name, sample_images(_named_images(parts, name, column))
    return None, None


def _are_image_names(values: pa.Array) -> bool:
    texts = [text for text in values.to_pylist() if text]
    found = sum(IMAGE_NAME.search(text) is not None for text in texts)
    return bool(texts) and found >= _USUAL_FRACTION * len(texts)


def _named_images(
    parts: Sequence[TablePart], name: str, column: RawColumn
) -> Iterator[tuple[str, bytes]]:
    folders = list(dict.fromkeys(part.path.parent for part in parts))
    names = column.values.to_pylist()
    relative = [text.replace("\\", "/") for text in names]
    candidates = [folder / path for path in relative for folder in folders]
    paths = [path for path in candidates if path.is_file()]
    if not paths:
        tried = folders[0] / names[0]
        raise DataError(
            f"the column {name!r} of {str(parts[0].path)!r} names images such as {names[0]!r}, but "
            f"{str(tried)!r} is not a file. Expected paths relative to the folder of the table."
        )
    places = np.unique(np.linspace(0, len(paths) - 1, min(MOST_IMAGES, len(paths))).astype(int))
    yield from payloads([str(paths[place]) for place in places])


def _stored_images(paths: Sequence[Path], column: str) -> Iterator[tuple[str, bytes]]:
    """Yield images from the first rows of some row groups.

    A cell with a path is read from its file.
    """
    for path in paths:
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        groups = file.num_row_groups
        most = max(1, MOST_IMAGES // (len(paths) * min(groups, _MOST_GROUPS)))
        for group in sorted({round(at) for at in np.linspace(0, groups - 1, _MOST_GROUPS)}):
            batches = file.iter_batches(most, row_groups=[group], columns=[column])
            for cell in next(batches, pa.record_batch({column: []}))[column].to_pylist():
                content = cell.get("bytes") if isinstance(cell, dict) else cell
                name = cell.get("path") if isinstance(cell, dict) else None
                if isinstance(content, bytes):
                    yield name or column, content
                elif name:
                    yield from payloads([str(path.parent / name)])


class ArchiveSample(NamedTuple):
    """The root of the unpacked files, the number of files in each folder below it, and remarks."""

    root: Path
    num_files: Counter[str]  # files by the folder's path relative to `root`; "." for the top
    notes: tuple[str, ...] = ()
    is_whole: bool = True  # every file of the archive was counted
    sheet: str | None = None  # of a workbook, unless it is the first


def _sample_archive(path: Path, folder: Path, sheet: str | None) -> ArchiveSample:
    """Unpack a sample into the empty `folder`; DataError if the archive is damaged or unsafe."""
    if path.suffix.lower() == WORKBOOK:
        return _read_workbook(path, folder, sheet)
    num_files, notes, is_whole = _unpack_some(path, folder)
    entries = visible_entries(folder)
    # The stages do the same.
    root = Path(entries[0].path) if len(entries) == 1 and entries[0].is_dir() else folder
    top = str(root.relative_to(folder))
    below = Counter(
        {
            str(PurePosixPath(place).relative_to(top)): count
            for place, count in num_files.items()
            if PurePosixPath(place).is_relative_to(top)
        }
    )
    return ArchiveSample(root, below, notes, is_whole)


def _read_workbook(path: Path, folder: Path, sheet: str | None) -> ArchiveSample:
    """Read a sheet: `sheet`, the first, or the only other one that is a table if that is none."""

    def read(name: str | None) -> ArchiveSample:
        most_bytes = _MOST_RATIO * path.stat().st_size
        notes = excel.write_sheet(path, folder / excel.SHEET, most_bytes, name)
        return ArchiveSample(folder, Counter({".": 1}), tuple(notes), sheet=name)

    try:
        return read(sheet)
    except excel.NoTableError as error:
        tables = []
        for name in error.others:
            with contextlib.suppress(DataError):
                read(name)
                if len(json_columns(folder / excel.SHEET)) > 1:  # an input and a target
                    tables.append(name)
        if len(tables) != 1:
            raise
        found = read(tables[0])
        note = f"the first sheet, {error.first!r}, is no table, so {tables[0]!r} is read"
        return found._replace(notes=(note, *found.notes))


def _unpack_some(path: Path, folder: Path) -> tuple[Counter[str], tuple[str, ...], bool]:
    """Unpack all tables and some files of each folder.

    Returns the files by folder, remarks, and True if there was time for all of them.
    """
    begin, num_bytes, is_whole = time.monotonic(), 0, True
    num_files: Counter[str] = Counter()
    names, inner, notes = MemberNames(), list[str](), dict[str, None]()
    for member in read_members(path, _MOST_MEMBERS, _MOST_RATIO * path.stat().st_size):
        if time.monotonic() - begin > _MOST_SECONDS:
            notes[f"looked at the first {num_files.total():,} files of the archive"] = None
            is_whole = False
            break
        inside = PurePosixPath(*member.parts)
        problem = member.problem or name_problem(member.name)
        if member.is_folder or (not problem and any(map(is_skipped, inside.parts))):
            continue
        if problem := problem or names.problem(member.parts, is_folder=False):
            raise DataError(
                f"the archive {str(path)!r} has {member.name!r}, {problem}. Pack it without it."
            )
        place = str(inside.parent)
        num_files[place] += 1
        is_table = is_table_file(inside.name)
        if is_table or (num_files[place] <= _FILES_PER_FOLDER and num_bytes < _MOST_BYTES):
            num_bytes += _write(member, folder / inside)
        if inside.name.lower().endswith(ENDINGS):
            inner.append(member.name)
        if member.foreign_name is not None and not notes:
            notes[name_hint(path, member.foreign_name)] = None
    if inner and len(inner) == num_files.total():
        raise only_archives(path, inner)
    return num_files, tuple(notes), is_whole


def _write(member: Member, target: Path) -> int:
    """Unpack one file and return its size in bytes; a large text table is cut after a line."""
    target.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    try:
        with member.open() as source, target.open("wb") as sink:
            while written < _MOST_TABLE_BYTES and (chunk := source.read(CHUNK_BYTES)):
                written += sink.write(chunk)
            is_cut = written >= _MOST_TABLE_BYTES and bool(source.read(1))
    except DAMAGE as error:
        raise DataError(
            f"{member.name!r} in the archive is damaged: {error}. Pack it again."
        ) from error
    if is_cut and is_parquet(target):
        raise DataError(f"{member.name!r} is too large to inspect: unpack the archive first.")
    if is_cut and is_table_file(target.name):
        with target.open("r+b") as file:
            _drop_last_line(file, written)
    return written


def _drop_last_line(file: IO[bytes], size: int) -> None:
    file.seek(size - CHUNK_BYTES)
    file.truncate(size - CHUNK_BYTES + file.read().rfind(b"\n") + 1)
