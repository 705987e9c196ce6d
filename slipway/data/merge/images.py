"""Merges new images into class folders or an image table; the merged file holds the images."""

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.config.sections import DataParams
from slipway.data.engine.rows import ROWS
from slipway.data.merge.cells import cells_of, flagged_labels, labels_of, written_label
from slipway.data.merge.new_rows import MergeReport, NewRows
from slipway.data.sources.raw_tables import COLLECTED, column_names, read_raw_table
from slipway.data.sources.samples import RawSample
from slipway.data.sources.sources import read_samples, table_in
from slipway.data.sources.text_format import TextFormat
from slipway.kinds.registry import kind_of
from slipway.system import files
from slipway.system.errors import DataError

_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_BATCH_ROWS = 64


class _FurtherColumns(NamedTuple):
    """The columns of an image table without a use in params.yaml; none for class folders."""

    cells: dict[str, pa.Array]
    positions: dict[int, int]  # position of each row by its number

    def position_of(self, sample: RawSample) -> int | None:
        number = sample.source.partition(":")[0]
        return self.positions.get(int(number)) if self.positions else None


def merge_images(
    data: DataParams, new: Path, out: Path, recent_from: int | None = None
) -> MergeReport:
    """Write the images of `data.path` and of `new` to `out`.

    `recent_from` is described in `merge`. Raises DataError if a column is missing.
    """
    report = MergeReport()
    further = _read_further_columns(data, report)
    marks = further.cells.pop(COLLECTED, None)
    contents, labels = _read_new(new, data)
    rows = NewRows((hashlib.sha256(content).digest() for content in contents), labels, report)

    def base_rows() -> Iterator[dict[str, Any]]:
        for sample in read_samples(data):
            report.num_base += 1
            position = further.position_of(sample)
            was_collected = (
                marks is not None and position is not None and marks[position].as_py() is True
            )
            digest = hashlib.sha256(sample.payload).digest()
            label = getattr(sample, kind_of(data.task).target.column)
            name = sample.source.partition(":")[2] if further.positions else sample.source
            extra = {}
            if position is not None:
                extra = {key: cells[position].as_py() for key, cells in further.cells.items()}
            yield {
                data.image_column: {"bytes": sample.payload or None, "path": name or None},
                **written_label(
                    rows.label_for(digest, label, sample.source, was_collected=was_collected), data
                ),
                **_special_cells(
                    data, sample.group, sample.time, sample.weight, sample.given_split
                ),
                **extra,
                COLLECTED: was_collected,
            }

    def added_rows() -> Iterator[dict[str, Any]]:
        for index in rows.to_add():
            report.num_added += 1
            report.added.append(index)
            group = f"collected-{hashlib.sha256(contents[index]).hexdigest()[:16]}"
            yield {
                data.image_column: {"bytes": contents[index], "path": None},
                **written_label(labels[index], data),
                **_special_cells(data, group, None, 1.0, "train"),
                COLLECTED: True,
            }

    schema = _schema(data, further)
    with files.new_file(out, files.PRIVATE) as file, pq.ParquetWriter(file, schema) as writer:
        for source in (base_rows(), added_rows()):
            while batch := list(islice(source, _BATCH_ROWS)):
                writer.write_table(pa.Table.from_pylist(batch, schema))
        writer.add_key_value_metadata(report.recent_mark(recent_from, Path(data.path)))
    return report


def _read_new(path: Path, data: DataParams) -> tuple[list[bytes], list[str | float | None]]:
    table = pq.read_table(path, partitioning=None)
    missing = {data.image_column, *data.target_columns} - set(table.column_names)
    if missing:
        raise DataError(
            f"{path} has the columns {', '.join(table.column_names)}, "
            f"expected {', '.join(sorted(missing))} among them. Collect the rows again."
        )
    contents = [cell["bytes"] for cell in table[data.image_column].to_pylist()]
    if isinstance(data.target_column, list):
        return contents, flagged_labels({name: table[name] for name in data.target_column})
    return contents, labels_of(table[data.target_column], data)


def _read_further_columns(data: DataParams, report: MergeReport) -> _FurtherColumns:
    root = Path(data.path)
    path = table_in(root, data) if root.is_dir() else root
    if path is None:
        return _FurtherColumns({}, {})
    named = {data.image_column, *data.target_columns, *_special_types(data)}
    names = [name for name in column_names(path, TextFormat.of(data)) if name and name not in named]
    raw = read_raw_table(path, names or [data.target_columns[0]], TextFormat.of(data))
    cells = {}
    for column in (raw.columns[name] for name in names):
        if column.stored == "other":
            report.omitted.append(column.unreadable)
        else:
            cells[column.name] = cells_of(column)
    return _FurtherColumns(cells, {row: place for place, row in enumerate(raw.numbers.tolist())})


def _schema(data: DataParams, further: _FurtherColumns) -> pa.Schema:
    target = ROWS.field(kind_of(data.task).target.column).type
    if isinstance(data.target_column, list):
        target = pa.bool_()
    columns = {data.image_column: _IMAGE} | dict.fromkeys(data.target_columns, target)
    columns |= _special_types(data)
    columns |= {name: cells.type for name, cells in further.cells.items()}
    return pa.schema([*columns.items(), (COLLECTED, pa.bool_())])


def _special_types(data: DataParams) -> dict[str, pa.DataType]:
    text, number = pa.string(), pa.float64()
    return _special_cells(data, text, number, number, text)


def _special_cells(
    data: DataParams, group: Any, time: Any, weight: Any, split: Any
) -> dict[str, Any]:
    cells = {
        data.group_column: group,
        data.time_column: time,
        data.weight_column: weight,
        data.split_column: split,
    }
    return {name: cell for name, cell in cells.items() if name is not None}
