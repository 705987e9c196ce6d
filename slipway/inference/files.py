"""Predicts whole files: a folder of images or a table, into a CSV, Parquet or JSON lines file.

Rows stream through, so memory does not grow with them. A run that was killed resumes after its
finished parts, and ends with the same bytes as an undisturbed run.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from slipway.config.sections import WORKBOOK
from slipway.data.sources.formats.json_lines import is_jsonl
from slipway.data.sources.text_format import TextFormat
from slipway.inference.local import LoadedModel, certified_model, load
from slipway.inference.outputs import Answer, AnswerFile, answer_file
from slipway.inference.parts import FORMAT_VERSION, PartRecord, PartsFolder, PartsManifest
from slipway.inference.predictions import required_pandas
from slipway.inference.sources import FileSource, RowFault
from slipway.inputs.contract import InputContract
from slipway.kinds.registry import input_kind
from slipway.predictor.model import CertifiedModel
from slipway.system import files
from slipway.system.errors import DataError

if TYPE_CHECKING:
    import pandas

Progress = Callable[[int, int | None], object]  # rows so far, and all rows if that is known
PathLike = str | os.PathLike[str]
_INVALID = RowFault("invalid_answer", "the model answered NaN or an infinity")


@dataclass(frozen=True)
class PredictedFile:
    """The result of `predict_files`: the file, and how many rows have an answer or a fault.

    >>> done = slipway.predict_files(model, "in.csv", "out.parquet")
    >>> done.rows, done.answered, done.faults
    (3, 2, {'type_violation': 1})
    """

    destination: Path
    rows: int  # of the source, 0 or more
    faults: dict[str, int]  # rows without an answer, by code of docs/reference/serving.md
    resumed_rows: int  # that an earlier, interrupted run had finished
    seconds: float  # of this run

    @property
    def answered(self) -> int:
        """The number of rows with an answer."""
        return self.rows - sum(self.faults.values())

    def to_arrow(self) -> pa.Table:
        """Read the file as a `pyarrow.Table`: a row for each row of the source, in its order.

        Raises DataError for a workbook, which pyarrow does not read.

        >>> done = slipway.predict_files(model, "in.csv", "out.csv")
        >>> done.to_arrow()["error_code"].to_pylist()
        ['', 'type_violation', '']
        """
        ending = self.destination.suffix.lower()
        if is_jsonl(self.destination):
            return pyarrow.json.read_json(self.destination)
        if ending == ".csv":
            names = pyarrow.csv.open_csv(self.destination).schema.names
            is_label = "prediction_set" in names
            texts = {name: pa.string() for name in ("prediction", "error") if is_label}
            return pyarrow.csv.read_csv(
                self.destination, convert_options=pyarrow.csv.ConvertOptions(column_types=texts)
            )
        if ending == WORKBOOK:
            raise DataError(
                f"{self.destination} is a workbook, expected .csv, .parquet or .jsonl. "
                "Read it with to_pandas()."
            )
        return pq.read_table(self.destination)

    def to_pandas(self) -> "pandas.DataFrame":
        """Read the file as a DataFrame: a row for each row of the source, in its order.

        >>> done = slipway.predict_files(model, "in.csv", "out.jsonl")
        >>> done.to_pandas().columns.tolist()
        ['row', 'prediction', 'error']
        """
        if self.destination.suffix.lower() == WORKBOOK:
            return required_pandas().read_excel(self.destination)
        required_pandas()
        return self.to_arrow().to_pandas()


def predict_files(
    model: LoadedModel | PathLike,
    source: PathLike,
    destination: PathLike,
    *,
    encoding: str | None = None,
    overwrite: bool = False,
    piece_rows: int | None = None,
    on_progress: Progress = lambda done, total: None,
) -> PredictedFile:
    """Predict each image or row of `source`, and write one row for each to `destination`.

    `model` is a loaded model or its path. `encoding` is that of a CSV, by default as in training.
    Bad rows stay in place, with the reason instead of an answer. Finished parts of `piece_rows`
    rows wait in DESTINATION.parts: the same call after a crash resumes after them. Raises DataError
    if the source as a whole cannot be read, if the destination exists (unless `overwrite`), or if
    its parts are of another model or source.

    >>> slipway.predict_files("my_project", "in.csv", "answers.csv").destination.name
    'answers.csv'
    """
    source, destination = Path(source), Path(destination)
    started = perf_counter()
    if piece_rows is not None and piece_rows < 1:
        raise DataError(f"piece_rows is {piece_rows}, expected 1 or more.")
    parts = PartsFolder(destination)
    if destination.exists() and not (overwrite or parts.is_complete):
        raise DataError(
            f"{str(destination)!r} exists, expected a new name. Choose another, or "
            "overwrite it with --overwrite (in Python: overwrite=True)."
        )
    with ExitStack() as stack:
        if not isinstance(model, LoadedModel):
            model = stack.enter_context(load(model))
        certified = certified_model(model)
        rows = _open_source(certified, source, encoding)
        stack.callback(rows.close)
        manifest = certified.bundle.manifest
        decision, remarks = certified.calibration.decision, manifest.input.remark_names
        output = answer_file(destination, rows.schema, manifest.output, decision, remarks)
        size = rows.piece_rows if piece_rows is None else piece_rows
        records = stack.enter_context(parts.opened(_manifest(certified, rows, size)))
        resumed = sum(record.rows for record in records)
        if not parts.is_complete:
            records += _write_parts(certified, rows, output, parts, len(records), size, on_progress)
            parts.complete()
        with files.new_file(destination) as file:
            output.join(map(parts.path, range(len(records))), file)
        files.remove_directory(parts.folder)
    faults = Counter[str]()
    for record in records:
        faults.update(record.faults)
    return PredictedFile(
        destination,
        sum(record.rows for record in records),
        dict(sorted(faults.items())),
        resumed,
        perf_counter() - started,
    )


def _write_parts(
    model: CertifiedModel,
    rows: FileSource,
    output: AnswerFile,
    parts: PartsFolder,
    num_parts: int,
    size: int,
    on_progress: Progress,
) -> Iterator[PartRecord]:
    """Predict the rows after the first `num_parts` parts, and yield the record of each part."""
    done = num_parts * size
    for number, piece in enumerate(rows.pieces(done, size, model.max_batch_size), num_parts):
        answers: list[Answer] = [None] * piece.carried.num_rows
        faults = piece.faults
        num_rows = 0
        for positions, inputs in piece.batches:
            for position, row in zip(positions, model.answer_rows(inputs), strict=True):
                answers[position] = row.answer
                if row.answer is None:
                    faults[position] = _INVALID
            num_rows += len(positions)
            on_progress(done + num_rows, rows.num_rows)
        content = output.encode(piece.carried, answers, faults)
        done += len(answers)
        on_progress(done, rows.num_rows)
        yield parts.write(
            number, content, len(answers), Counter(fault.code for fault in faults.values())
        )


def _open_source(model: CertifiedModel, path: Path, encoding: str | None) -> FileSource:
    contract = model.bundle.manifest.input
    data = model.bundle.manifest.lineage.params.get("data", {})
    words = (word.strip().lower() for word in data.get("missing_values", ()))
    written = TextFormat(
        encoding or data.get("encoding", "utf-8"),
        tuple(words),
        data.get("date_format"),
        sheet=data.get("sheet"),
    )
    make: Callable[[InputContract, Path, TextFormat], FileSource]
    make = input_kind(contract.kind).load_part("source")
    return make(contract, path, written)


def _manifest(model: CertifiedModel, source: FileSource, piece_rows: int) -> PartsManifest:
    actual = model.selection.actual.model_dump(mode="json")
    return PartsManifest(
        format_version=FORMAT_VERSION,
        model=model.bundle.digest,
        execution=actual | {"num_threads": str(model.num_threads)},
        batch_size=model.max_batch_size,
        source=source.identity,
        piece_rows=piece_rows,
    )
