"""Raw images that a Parquet file or a CSV holds or names, one per row. A file is read by batches, so memory does not grow with the data."""

import csv
import difflib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.config.sections import DataParams
from slipway.data.sources.annotations import annotate
from slipway.data.sources.samples import Fault, RawSample
from slipway.system.errors import DataError

TABLES = (".parquet", ".pq", ".csv")
_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20


def read_rows(path: Path, data: DataParams, wanted: frozenset[int] | None) -> Iterator[RawSample]:
    """Every row of a table, or those whose number is in `wanted`, in their order; images in files of their own are not read yet."""
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
            header = next((line for line in reader if line), None)
            if header is None:
                raise DataError(f"data.path {str(path)!r} is empty, expected a header and rows.")
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
    optional = {key: getattr(data, key) for key in ("group_column", "time_column", "weight_column", "split_column")}
    needed |= {key: name for key, name in optional.items() if name is not None}
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
    image = _image_cell(folder, cells[data.image_column])
    said = annotate(cells, data)
    source = f"{row}:{image.name}" if image.name else str(row)
    fault = image.fault or said.fault
    path = image.path if fault is None else None
    rest = (said.time, said.weight, said.given_split, said.corrections, path)
    return RawSample(source, image.payload, said.label, said.target, said.group, fault, *rest)


class _ImageCell(NamedTuple):
    name: str | None  # the path as the cell has it
    payload: bytes = b""
    fault: Fault | None = None
    path: str | None = None  # of the file to read


def _image_cell(folder: Path, cell: Any) -> _ImageCell:
    name = cell.get("path") if isinstance(cell, dict) else cell if isinstance(cell, str) else None
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if isinstance(content, bytes):
        return _ImageCell(name, content)
    if not name:
        return _ImageCell(None, fault=Fault("missing_image", "the image column is empty"))
    path = PurePosixPath(os.path.normpath(name.replace("\\", "/")))
    # By the text of the path alone: a link inside the folder is the owner's own decision (DVC's cache makes such links).
    if path.is_absolute() or path.parts[:1] == ("..",):
        fault = Fault("outside_folder", f"{name} leads out of {folder}, expected a path relative to the table's folder")
        return _ImageCell(name, fault=fault)
    return _ImageCell(name, path=str(folder / path))
