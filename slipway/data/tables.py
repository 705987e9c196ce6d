"""Raw samples from a Parquet file or a CSV, one per row. A file is read by batches, so memory does not grow with the data."""

import csv
import difflib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.contract import Task, is_classification
from slipway.data.samples import Fault, RawSample, read_file
from slipway.errors import DataError
from slipway.params import DataParams

TABLES = (".parquet", ".pq", ".csv")
_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20


class _Annotation(NamedTuple):
    label: str | None
    target: float | None
    group: str | None
    fault: Fault | None


def read_rows(path: Path, data: DataParams, wanted: frozenset[int] | None) -> Iterator[RawSample]:
    """Every row of a table, or those whose number is in `wanted`, in their order."""
    return _read_csv(path, data, wanted) if _is_csv(path) else _read_parquet(path, data, wanted)


def count_rows(path: Path) -> int | None:
    """How many rows there are; None where counting means reading (CSV)."""
    return None if _is_csv(path) else int(_open_parquet(path).metadata.num_rows)


def _is_csv(path: Path) -> bool:
    return path.suffix.lower() == ".csv"


def _read_parquet(path: Path, data: DataParams, wanted: frozenset[int] | None) -> Iterator[RawSample]:
    file = _open_parquet(path)
    names = _needed_columns(path, data, file.schema_arrow.names)
    _check_image_type(path, data.image_column, file.schema_arrow.field(data.image_column).type)
    row = 0
    try:
        for batch in file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
            chosen = [index for index in range(batch.num_rows) if wanted is None or row + index in wanted]
            for index, cells in zip(chosen, batch.take(pa.array(chosen, pa.int64())).to_pylist(), strict=True):
                yield _table_sample(path.parent, row + index, cells, data)
            row += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.path {str(path)!r} is damaged after row {row}: {str(error).rstrip('.')}. Write or copy the file again."
        ) from error


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)  # by pages, not by whole row groups
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"data.path {str(path)!r} is not a readable Parquet file: {str(error).rstrip('.')}. Write or copy the file again."
        ) from error


def _check_image_type(path: Path, column: str, found: pa.DataType) -> None:
    is_bytes_and_path = pa.types.is_struct(found) and found.get_field_index("bytes") >= 0
    if is_bytes_and_path or any(test(found) for test in (pa.types.is_binary, pa.types.is_large_binary, *_STRING_TYPES)):
        return
    raise DataError(
        f"data.image_column {column!r} of {str(path)!r} has the type {found}, expected encoded image bytes "
        "(binary, or a struct with 'bytes' and 'path') or paths (string)."
    )


_STRING_TYPES = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_dictionary)


def _read_csv(path: Path, data: DataParams, wanted: frozenset[int] | None) -> Iterator[RawSample]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            names = _needed_columns(path, data, header)
            positions = [header.index(name) for name in names]
            for row, cells in enumerate(line for line in reader if line):
                if wanted is None or row in wanted:
                    yield _csv_sample(path.parent, row, cells, len(header), dict(zip(names, positions, strict=True)), data)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"data.path {str(path)!r} is not a readable CSV near line {reader.line_num + 1}: {error}. "
                "Expected UTF-8 text, commas between the columns and quotes that close."
            ) from error


def _csv_sample(folder: Path, row: int, cells: list[str], num_columns: int, positions: dict[str, int], data: DataParams) -> RawSample:
    if len(cells) != num_columns:
        fault = Fault("malformed_row", f"{len(cells)} columns, the header has {num_columns}")
        return RawSample(str(row), b"", None, None, None, fault)
    return _table_sample(folder, row, {name: cells[position] for name, position in positions.items()}, data)


def _needed_columns(path: Path, data: DataParams, present: list[str]) -> list[str]:
    needed = {"image_column": data.image_column, "target_column": data.target_column}
    if data.group_column is not None:
        needed["group_column"] = data.group_column
    problems = [f"  data.{key} is {name!r}, {_hint(name, present)}" for key, name in needed.items() if name not in present]
    twice = [name for name in needed.values() if present.count(name) > 1]
    problems += [f"  the column {name!r} is there {present.count(name)} times" for name in sorted(set(twice))]
    if problems:
        columns = ", ".join(present) if present else "none"
        raise DataError(f"{str(path)!r} has the columns {columns}.\n" + "\n".join(problems))
    return list(dict.fromkeys(needed.values()))


def _hint(name: str, present: list[str]) -> str:
    if len(present) == 1 and any(mark in present[0] for mark in ";\t"):
        return "which is not there: the columns are not separated by commas"
    close = difflib.get_close_matches(name, present, n=1, cutoff=0.5)
    return f"which is not there; did you mean {close[0]!r}?" if close else "which is not there"


def _table_sample(folder: Path, row: int, cells: dict[str, Any], data: DataParams) -> RawSample:
    name, payload, fault = _image_cell(folder, cells[data.image_column])
    annotation = _annotate(cells, data)
    source = f"{row}:{name}" if name else str(row)
    return RawSample(source, payload, annotation.label, annotation.target, annotation.group, fault or annotation.fault)


def _image_cell(folder: Path, cell: Any) -> tuple[str | None, bytes, Fault | None]:
    """The path that a cell names, the image bytes, and what is wrong."""
    name = cell.get("path") if isinstance(cell, dict) else cell if isinstance(cell, str) else None
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if isinstance(content, bytes):
        return name, content, None
    if not name:
        return None, b"", Fault("missing_image", "the image column is empty")
    path = PurePosixPath(os.path.normpath(name.replace("\\", "/")))
    # By the text of the path alone: a link inside the folder is the owner's own decision (DVC's cache makes such links).
    if path.is_absolute() or path.parts[:1] == ("..",):
        return name, b"", Fault("outside_folder", f"{name} leads out of {folder}, expected a path relative to the table's folder")
    return name, *read_file(folder / path)


def _annotate(cells: dict[str, Any], data: DataParams) -> _Annotation:
    group = _text(cells[data.group_column]) if data.group_column is not None else None
    label, target, fault = _read_target(cells[data.target_column], data.task)
    if fault is None and data.group_column is not None and group is None:
        fault = Fault("missing_group", f"the column {data.group_column!r} is empty, expected the name of a group")
    return _Annotation(label, target, group, fault)


def _read_target(cell: Any, task: Task) -> tuple[str | None, float | None, Fault | None]:
    text = _text(cell)
    if is_classification(task):
        return text, None, None if text else Fault("missing_label", "the target column is empty, expected a class")
    if text is None and not isinstance(cell, float):
        return None, None, Fault("missing_target", "the target column is empty, expected a number")
    try:
        number = float(cell)
    except (TypeError, ValueError):
        return None, None, Fault("not_a_number", f"the target is {text!r}, expected a number")
    if not math.isfinite(number):
        return None, None, Fault("non_finite_target", f"the target is {number}, expected a finite number")
    return None, number, None


def _text(cell: Any) -> str | None:
    """A cell as text without blanks around it; None when nothing is left. A whole float is written as an integer."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return None
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, bytes):
        cell = cell.decode(errors="replace")
    return str(cell).strip() or None
