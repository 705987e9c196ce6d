"""Writes predictions to CSV, Parquet, JSON lines or a workbook, by the ending of the file's name.

The file has a row for each row of the source, in the same order: the source's cells, then the
answer, or the reason why there is none. A file is written in parts; the joined content depends only
on the rows, not on interruptions.
"""

import csv
import io
import json
import math
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.artifacts.bundle import OutputContract
from slipway.artifacts.uncertainty import Decision
from slipway.config.sections import WORKBOOK
from slipway.data.sources.formats.excel import MOST_ROWS, required_openpyxl
from slipway.data.sources.raw_tables import EXACT_INTEGERS
from slipway.inference.predictions import predicted_columns
from slipway.inference.sources import JSON_ROW, RowFault
from slipway.system.errors import DataError

Answer = Mapping[str, Any] | None
_MOST_CHARACTERS = 32_767  # of a cell of Excel, which cuts a longer text itself
_TIMES = rb"<dcterms:(created|modified)[^>]*>[^<]*</dcterms:(created|modified)>"


class AnswerFile(Protocol):
    """Encodes answers in one file format."""

    def encode(
        self, carried: pa.Table, answers: Sequence[Answer], faults: Mapping[int, RowFault]
    ) -> bytes:
        """Encode the rows of one part as bytes. Each row has an answer or a fault."""

    def join(self, parts: Iterable[Path], file: IO[bytes]) -> None:
        """Write the content of all parts to one file."""


def answer_file(
    path: Path,
    carried: pa.Schema,
    output: OutputContract,
    decision: Decision | None,
    remarks: Sequence[str] = (),
) -> AnswerFile:
    """Return the format for the ending of `path`.

    `remarks` are the names of extra true-or-false fields of each answer. Raises DataError if the
    ending is unknown, or if a column of the source has the name of an answer column.
    """
    make = _FORMATS.get(path.suffix.lower())
    if make is None:
        raise DataError(
            f"{str(path)!r} has an unknown ending, expected one of {', '.join(_FORMATS)}."
        )
    return make(carried, output, decision, remarks)


class JsonLines:
    """JSON lines: one object per row, with the keys `row` (cells), `prediction` and `error`."""

    def __init__(
        self,
        carried: pa.Schema,
        output: OutputContract,
        decision: Decision | None,
        remarks: Sequence[str] = (),
    ) -> None:
        self._is_json = carried.names == [JSON_ROW]  # the cells are the text of a JSON object

    def encode(
        self, carried: pa.Table, answers: Sequence[Answer], faults: Mapping[int, RowFault]
    ) -> bytes:
        lines = []
        for position, (cells, answer) in enumerate(zip(carried.to_pylist(), answers, strict=True)):
            row = cells[JSON_ROW] if self._is_json else _json(cells)
            fault = faults.get(position)
            error = _json(fault and fault._asdict())
            lines.append(f'{{"row": {row}, "prediction": {_json(answer)}, "error": {error}}}\n')
        return "".join(lines).encode()

    def join(self, parts: Iterable[Path], file: IO[bytes]) -> None:
        for part in parts:
            with part.open("rb") as content:
                shutil.copyfileobj(content, file)


class ParquetAnswers:
    """Parquet: a row group per part; the source's columns, then a column per answer field."""

    def __init__(
        self,
        carried: pa.Schema,
        output: OutputContract,
        decision: Decision | None,
        remarks: Sequence[str] = (),
    ) -> None:
        self._labels = output.labels
        self._names = [f"probability_{label}" for label in output.labels]
        self._several = output.kind == "label_probabilities"
        costs = _cost_fields(decision)
        self._facts = ("ood_score", "is_ood", *remarks, *costs)
        self._own = pa.schema(
            [
                *self._predicted_fields(),
                *costs.items(),
                ("ood_score", pa.float64()),
                *((name, pa.bool_()) for name in ("is_ood", *remarks)),
                ("error_code", pa.string()),
                ("error", pa.string()),
            ]
        )
        twice = sorted(set(carried.names) & set(self._own.names))
        if twice:
            raise DataError(
                f"the input has the columns {', '.join(map(repr, twice))}, which the answers have "
                "too. Rename them, or write to a .jsonl file."
            )
        self.schema = pa.schema([*carried, *self._own])

    def encode(
        self, carried: pa.Table, answers: Sequence[Answer], faults: Mapping[int, RowFault]
    ) -> bytes:
        stream = io.BytesIO()
        pq.write_table(self.table(carried, answers, faults), stream)
        return stream.getvalue()

    def table(
        self, carried: pa.Table, answers: Sequence[Answer], faults: Mapping[int, RowFault]
    ) -> pa.Table:
        """Return a table of the source's cells followed by the columns of the answers."""
        found: list[Mapping[str, Any]] = [answer or {} for answer in answers]
        columns = {name: [answer.get(name) for answer in found] for name in self._facts}
        columns |= predicted_columns(found, self._labels)
        each_fault = [faults.get(position) for position in range(len(answers))]
        columns["error_code"] = [fault and fault.code for fault in each_fault]
        columns["error"] = [fault and fault.message for fault in each_fault]
        own = [pa.array(columns[field.name], field.type) for field in self._own]
        return pa.Table.from_arrays([*carried.columns, *own], schema=self.schema)

    def _predicted_fields(self) -> list[tuple[str, pa.DataType]]:
        """Return the names and types of the columns of `predicted_columns`."""
        if not self._labels:
            names = ("prediction", "interval_low", "interval_high")
            return [(name, pa.float64()) for name in names]
        labels = pa.list_(pa.string())
        return [
            ("prediction", labels if self._several else pa.string()),
            *((name, pa.float64()) for name in self._names),
            ("prediction_set", labels),
        ]

    def join(self, parts: Iterable[Path], file: IO[bytes]) -> None:
        with pq.ParquetWriter(file, self.schema) as writer:
            for part in parts:
                writer.write_table(pq.read_table(part, schema=self.schema))


class CsvAnswers(JsonLines):
    """CSV: the columns of `ParquetAnswers` as text; a prediction set is a JSON list."""

    def __init__(
        self,
        carried: pa.Schema,
        output: OutputContract,
        decision: Decision | None,
        remarks: Sequence[str] = (),
    ) -> None:
        self._table = ParquetAnswers(carried, output, decision, remarks)

    def encode(
        self, carried: pa.Table, answers: Sequence[Answer], faults: Mapping[int, RowFault]
    ) -> bytes:
        table = self._table.table(carried, answers, faults)
        columns = [[_text(cell) for cell in column.to_pylist()] for column in table.columns]
        return _csv(zip(*columns, strict=True))

    def join(self, parts: Iterable[Path], file: IO[bytes]) -> None:
        file.write(_csv([self._table.schema.names]))
        super().join(parts, file)


class ExcelAnswers(ParquetAnswers):
    """A workbook: the columns of `ParquetAnswers` in one sheet; a prediction set is a JSON list.

    The parts are Parquet. Equal rows give equal bytes, so the file has no time of writing.
    """

    def join(self, parts: Iterable[Path], file: IO[bytes]) -> None:
        openpyxl = required_openpyxl()
        parts = list(parts)
        if sum(pq.read_metadata(part).num_rows for part in parts) >= MOST_ROWS:
            raise DataError(
                f"a sheet of Excel holds {MOST_ROWS:,} rows, which the answers exceed. Write "
                "them to a .csv, .parquet or .jsonl file."
            )
        book = openpyxl.Workbook(write_only=True)
        sheet = book.create_sheet("predictions")
        sheet.append(self.schema.names)
        for part in parts:
            table = pq.read_table(part, schema=self.schema)
            for cells in zip(*(column.to_pylist() for column in table.columns), strict=True):
                sheet.append([_excel_cell(cell, sheet, openpyxl) for cell in cells])
        written = io.BytesIO()
        book.save(written)
        with zipfile.ZipFile(written) as source, zipfile.ZipFile(file, "w") as target:
            for name in source.namelist():
                content = re.sub(_TIMES, b"", source.read(name))
                info = zipfile.ZipInfo(name)  # of 1980
                target.writestr(info, content, zipfile.ZIP_DEFLATED)


def _excel_cell(cell: Any, sheet: Any, openpyxl: Any) -> Any:
    """Return a cell for a sheet; text stays text, also if it begins like a formula."""
    if cell is None or isinstance(cell, bool):
        return cell
    if isinstance(cell, int | float) and math.isfinite(cell) and abs(cell) <= EXACT_INTEGERS:
        return cell
    if isinstance(cell, float) and math.isnan(cell):
        return None
    text = _text(cell)
    plain = openpyxl.cell.cell.ILLEGAL_CHARACTERS_RE.sub("\N{REPLACEMENT CHARACTER}", str(text))
    found = openpyxl.cell.WriteOnlyCell(sheet, plain[:_MOST_CHARACTERS])
    found.data_type = "s"
    return found


def _cost_fields(decision: Decision | None) -> dict[str, pa.DataType]:
    """Return the names and types of the columns that a decision by costs adds."""
    if decision is None or not decision.costs:
        return {}
    abstains = decision.costs.abstain is not None
    return {"expected_cost": pa.float64()} | ({"abstain": pa.bool_()} if abstains else {})


def _text(cell: Any) -> Any:
    if isinstance(cell, (bool, list, dict)):
        return _json(cell)
    return cell


def _csv(rows: Iterable[Iterable[Any]]) -> bytes:
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\n").writerows(rows)
    return stream.getvalue().encode()


def _json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, default=str)


_AnswerFormat = Callable[[pa.Schema, OutputContract, Decision | None, Sequence[str]], AnswerFile]
_FORMATS: Mapping[str, _AnswerFormat] = {
    ".csv": CsvAnswers,
    ".parquet": ParquetAnswers,
    ".pq": ParquetAnswers,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    WORKBOOK: ExcelAnswers,
}
