"""`python -m slipway.data.join OUT.parquet`: what `data.path` is now and what `slipway.traffic.collect` wrote, as one data set in one file.

The old rows stay as they are, in their order; the collected ones follow, and the column `slipway_collected`, which is never an input, tells
them apart. A collected row that is there already is not added again. Nothing is trained: the command that would is printed.
docs/collect.md explains it.
"""

import argparse
import hashlib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipway.config.command import run_command
from slipway.config.params import load_params
from slipway.config.sections import DataParams
from slipway.data.sources.archives import ArchiveLimits, unpacked
from slipway.data.sources.raw_tables import COLLECTED as MARK
from slipway.data.sources.raw_tables import (
    RawColumn,
    RawTable,
    column_names,
    is_row_index,
    read_raw_table,
)
from slipway.data.sources.samples import GIVEN_SPLIT, spelled
from slipway.data.sources.sources import find_layout, read_samples, table_in, with_given_split
from slipway.data.tables.cells import (
    FALSE_WORDS,
    GOOD,
    MISSING,
    TRUE_WORDS,
    TypedColumn,
    row_digests,
    typed_column,
)
from slipway.data.tables.column_rules import constant_columns, duplicate_columns, tells_classes
from slipway.data.tables.column_types import column_types, counts_rows
from slipway.data.tables.source import find_table
from slipway.data.tables.targets import label_of
from slipway.kinds.registry import is_classification, is_table
from slipway.system import files
from slipway.system.errors import DataError

_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_ARROW = {"text": pa.string(), "number": pa.float64(), "boolean": pa.bool_()}
_BATCH_ROWS = 64


@dataclass
class Joined:
    """How many rows came from where."""

    num_old: int = 0
    num_added: int = 0
    num_known: int = 0  # collected rows whose content the old data has
    num_renewed: int = 0  # of them, whose label was corrected: a collected row of an earlier time
    conflicting: list[str] = field(
        default_factory=list
    )  # sources of old rows that have another label: both are kept
    left_out: list[str] = field(default_factory=list)  # what the old data has and the file has not


def main(arguments: Sequence[str] | None = None) -> None:
    """The command, in the project's folder. A SlipwayError says why nothing was written."""
    given = _parser().parse_args(arguments)
    if given.out.suffix != ".parquet":
        raise DataError(f"{given.out} does not end in .parquet, which is what this writes.")
    params = load_params()
    asked = (
        params.data
        if given.old is None
        else params.data.model_copy(update={"path": str(given.old)})
    )
    data = unpacked(
        asked, ArchiveLimits(params.clean.max_archive_members, params.clean.max_archive_ratio)
    )
    _require_parquet(given.collected)
    joined = join(data, given.collected, given.out)
    print(summary(joined, data, given.out))


def _require_parquet(collected: Path) -> None:
    """DataError unless it is there and, as far as its end tells, Parquet."""
    remedy = "write it with `python -m slipway.traffic.collect`, or name it with --collected."
    if not collected.is_file():
        raise DataError(f"{collected} is not there; {remedy}")
    try:
        pq.read_schema(collected)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{collected} is not a readable Parquet file ({str(error).rstrip('.')}); {remedy}"
        ) from error


def join(data: DataParams, collected: Path, out: Path) -> Joined:
    """Write the rows of `data.path` and those of `collected` to `out`; DataError if they do not go together.

    A split that folders or shards give becomes the column GIVEN_SPLIT.
    """
    data, _ = with_given_split(data)
    return (
        _join_tables(data, collected, out)
        if is_table(data.task)
        else _join_images(data, collected, out)
    )


def summary(joined: Joined, data: DataParams, out: Path) -> str:
    """What was written, what a person should look at, and the command that may be run next."""
    lines = [
        f"{joined.num_old} rows of {data.path} and {joined.num_added} collected ones are in {out}, marked in the column {MARK!r}"
    ]
    if joined.num_known:
        renewed = f", {joined.num_renewed} of them with a new truth" if joined.num_renewed else ""
        lines.append(f"  {joined.num_known} collected rows were there already{renewed}")
    if joined.conflicting:
        shown = ", ".join(joined.conflicting[:10]) + ", ..." * (len(joined.conflicting) > 10)
        lines.append(
            f"  {len(joined.conflicting)} have another label in the old data, rows {shown}: both are kept; look at them"
        )
        lines.append("  (`clean` refuses such pairs, or flags them: clean.rules.conflicting_label)")
    lines += [f"  left out: {what}" for what in joined.left_out]
    return "\n".join([*lines, f"next: {next_command(data, out)}"])


def next_command(data: DataParams, out: Path) -> str:
    """How an experiment with the joined rows is begun."""
    changes = [f"data.path={out}"]
    if data.time_column is not None:
        changes.append(
            "data.time_column=null"
        )  # nobody knows in which unit the collected rows' times would be
    if find_layout(data).given:
        changes.append(
            f"data.split_column={GIVEN_SPLIT}"
        )  # folders and shards say nothing of the joined file
    if data.checksums is not None:
        changes.append("data.checksums=null")
    return " ".join(["dvc exp run", *(f"-S {shlex.quote(change)}" for change in changes)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slipway.data.join", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "out", type=Path, metavar="OUT.parquet", help="the data set that is written"
    )
    parser.add_argument(
        "--collected",
        type=Path,
        default=Path("data/collected.parquet"),
        help="what `python -m slipway.traffic.collect` wrote",
    )
    parser.add_argument(
        "--old", type=Path, help="the data of before (default: data.path of params.yaml)"
    )
    return parser


class _Collected:
    """The collected rows by their content, and which of them are still to be added."""

    def __init__(
        self, digests: Iterable[bytes], truths: Sequence[str | float | None], joined: Joined
    ) -> None:
        self.truths = truths
        self.is_new = [True] * len(truths)
        self._places: dict[bytes, int] = {}
        self._seen: set[int] = set()
        self._joined = joined
        for place, digest in enumerate(digests):
            self._take(place, digest)

    def _take(self, place: int, digest: bytes) -> None:
        """Of rows that are equal by value, though they were sent in other forms, one counts: the last with a truth, or else the last."""
        before = self._places.setdefault(digest, place)
        if before == place:
            return
        if self.truths[place] is not None or self.truths[before] is None:
            self._places[digest], place = place, before
        self._note(place)

    def truth_for(
        self, digest: bytes, label: str | float | None, source: str, *, was_collected: bool
    ) -> str | float | None:
        """The label of an old row: its own, or what was told since of a row that was collected before."""
        place = self._places.get(digest)
        if place is None or self.truths[place] == label:
            self._note(place)
            return label
        told = self.truths[place]
        if told is None or was_collected:
            self._note(place)
            self._joined.num_renewed += told is not None
            return label if told is None else told
        self._joined.conflicting.append(source)
        return label

    def _note(self, place: int | None) -> None:
        if place is not None:
            self.is_new[place] = False
            if place not in self._seen:
                self._seen.add(place)
                self._joined.num_known += 1

    @property
    def new(self) -> list[int]:
        """Places of those that the old data does not have, in their order."""
        return [place for place, is_new in enumerate(self.is_new) if is_new]


def _join_images(data: DataParams, collected: Path, out: Path) -> Joined:
    joined = Joined()
    further, numbers = _further_columns(data, joined)
    rows = _columns(
        pq.read_table(collected, partitioning=None),
        (data.image_column, data.target_column),
        collected,
    )
    contents = [cell["bytes"] for cell in rows[data.image_column].to_pylist()]
    known = _Collected(
        (hashlib.sha256(content).digest() for content in contents),
        _truths(rows[data.target_column], data),
        joined,
    )
    marks = further.pop(MARK, None)
    schema = pa.schema(
        [
            pa.field(data.image_column, _IMAGE),
            pa.field(
                data.target_column, pa.string() if is_classification(data.task) else pa.float64()
            ),
            *(pa.field(name, kind) for name, kind in _special(data).items()),
            *(pa.field(name, column.type) for name, column in further.items()),
            pa.field(MARK, pa.bool_()),
        ]
    )

    def old() -> Iterator[dict[str, Any]]:
        for sample in read_samples(data):
            joined.num_old += 1
            place = numbers.get(int(sample.source.partition(":")[0])) if numbers else None
            was_collected = marks is not None and place is not None and marks[place].as_py() is True
            label: str | float | None = (
                sample.label if is_classification(data.task) else sample.target
            )
            label = known.truth_for(
                hashlib.sha256(sample.payload).digest(),
                label,
                sample.source,
                was_collected=was_collected,
            )
            name = sample.source.partition(":")[2] if numbers else sample.source
            yield {
                data.image_column: {"bytes": sample.payload or None, "path": name or None},
                data.target_column: label,
                **_given(data, sample.group, sample.time, sample.weight, sample.given_split),
                **{
                    name: column[place].as_py()
                    for name, column in further.items()
                    if place is not None
                },
                MARK: was_collected,
            }

    def added() -> Iterator[dict[str, Any]]:
        for place in known.new:
            joined.num_added += 1
            image, group = (
                {"bytes": contents[place], "path": None},
                f"collected-{hashlib.sha256(contents[place]).hexdigest()[:16]}",
            )
            fields = _given(data, group, None, 1.0, "train")
            yield {
                data.image_column: image,
                data.target_column: known.truths[place],
                **fields,
                MARK: True,
            }

    with files.new_file(out, files.PRIVATE) as file, pq.ParquetWriter(file, schema) as writer:
        for source in (old(), added()):
            while batch := list(islice(source, _BATCH_ROWS)):
                writer.write_table(pa.Table.from_pylist(batch, schema))
    return joined


def _special(data: DataParams) -> dict[str, pa.DataType]:
    kinds = {
        data.group_column: pa.string(),
        data.time_column: pa.float64(),
        data.weight_column: pa.float64(),
        data.split_column: pa.string(),
    }
    return {name: kind for name, kind in kinds.items() if name is not None}


def _given(
    data: DataParams, group: str | None, time: float | None, weight: float | None, split: str | None
) -> dict[str, Any]:
    found = {
        data.group_column: group,
        data.time_column: time,
        data.weight_column: weight,
        data.split_column: split,
    }
    return {name: value for name, value in found.items() if name is not None}


def _further_columns(
    data: DataParams, joined: Joined
) -> tuple[dict[str, pa.Array], dict[int, int]]:
    """The columns of a table of images that no key names, and the place of each row's number in them; nothing for a folder of classes."""
    root = Path(data.path)
    path = table_in(root) if root.is_dir() else root
    if path is None:
        return {}, {}
    taken = {data.image_column, data.target_column, *_special(data)}
    names = [name for name in column_names(path) if name not in taken and name]
    raw = read_raw_table(path, names or [data.target_column])
    places = {number: place for place, number in enumerate(raw.numbers.tolist())}
    columns = {name: raw.columns[name] for name in names}
    joined.left_out += [_unread(column) for column in columns.values() if column.stored == "other"]
    return {
        name: _cells(column) for name, column in columns.items() if column.stored != "other"
    }, places


def _unread(column: RawColumn) -> str:
    return f"the column {column.name!r}, whose type {column.arrow_type} no reader takes"


def _join_tables(data: DataParams, collected: Path, out: Path) -> Joined:
    joined = Joined()
    old, new = read_raw_table(find_table(data)), read_raw_table(collected)
    inputs = [name for name in new.columns if name != data.target_column]
    missing = [
        name
        for name in (*inputs, data.target_column)
        if name not in old.columns or name not in new.columns
    ]
    if missing:
        raise DataError(
            f"{data.path} and {collected} do not both have the columns {', '.join(missing)}; they cannot be joined."
        )
    kinds = {
        guess.name: guess.kind
        for guess in column_types({name: old.columns[name] for name in inputs}, data.columns)
    }
    kinds |= {name: "boolean" for name in inputs if new.columns[name].stored == "boolean"}
    old_digests, new_digests = _digests(old, kinds), _digests(new, kinds)
    truths = _truths(_cells(new.columns[data.target_column]), data)
    own = _truths(_cells(old.columns[data.target_column]), data)
    known = _Collected(new_digests, truths, joined)
    marks = _cells(old.columns[MARK]).to_pylist() if MARK in old.columns else [False] * len(own)
    was_collected = [str(mark).lower() == "true" for mark in marks]
    labels = [
        known.truth_for(digest, label, str(number), was_collected=mark)
        for digest, label, number, mark in zip(
            old_digests, own, old.numbers.tolist(), was_collected, strict=True
        )
    ]
    chosen = known.new
    joined.num_old, joined.num_added = len(labels), len(chosen)
    added = _Added(
        chosen,
        [new_digests[place] for place in chosen],
        [truths[place] for place in chosen],
        labels,
    )
    columns: dict[str, pa.Array] = {}
    for name, column in old.columns.items():
        if name == MARK:
            continue
        if column.stored == "other":
            joined.left_out.append(_unread(column))
        elif name == data.target_column:
            told = [
                cell if label == before else label
                for cell, before, label in zip(_cells(column).to_pylist(), own, labels, strict=True)
            ]
            columns[name] = _targets([*told, *added.truths], column, data)
        else:
            columns[name] = _together(_cells(column), _of_collected(name, data, old, new, added))
    columns[MARK] = pa.array([*was_collected, *[True] * len(chosen)])
    joined.left_out += [f"row {number} of {data.path}: {what}" for number, what in old.malformed]
    with files.new_file(out, files.PRIVATE) as file:
        pq.write_table(pa.table(columns), file)
    return joined


@dataclass(frozen=True)
class _Added:
    """The collected rows that are added: their places, digests and truths; and the labels of the old rows."""

    places: list[int]
    digests: list[bytes]
    truths: list[str | float | None]
    old_labels: list[str | float | None]


def _of_collected(
    name: str, data: DataParams, old: RawTable, new: RawTable, added: _Added
) -> pa.Array:
    """The cells of the added rows in a column of the old data.

    A column that is no input because of what its cells are goes on as it is: it has one value, repeats an input, names the classes or
    counts the rows. Otherwise it would tell collected rows from others, and become an input by that.
    """
    places, column = pa.array(added.places, pa.int64()), old.columns[name]
    if name in new.columns:
        return _cells(new.columns[name]).take(places)
    filled = {
        data.group_column: [f"collected-{digest.hex()[:16]}" for digest in added.digests],
        data.weight_column: [1.0] * len(places),
        data.split_column: ["train"] * len(places),
    }
    if name in filled:
        return pa.array(filled[name])
    nothing = pa.nulls(len(places), column.values.type)
    if name == data.time_column or is_row_index(name) or not len(old.numbers):
        return nothing
    if counts_rows(column):
        last = typed_column(column, "number").cells[-1]
        return pa.array([float(last) + step for step in range(1, len(places) + 1)], pa.float64())
    typed, has_label = (
        _typed(column, data),
        np.array([label is not None for label in added.old_labels]),
    )
    if typed is None or not has_label.any():
        return nothing
    if constant_columns([typed], has_label):
        return _cells(column).take(pa.array([int(np.argmax(has_label))] * len(places)))
    for other in new.columns:
        twin = _typed(old.columns[other], data) if other != data.target_column else None
        if twin is not None and duplicate_columns([twin, typed], has_label):
            return _cells(new.columns[other]).take(places)
    if is_classification(data.task):
        rows = np.flatnonzero(has_label)
        names, classes = np.unique(
            [str(added.old_labels[row]) for row in rows], return_inverse=True
        )
        if tells_classes(typed.keys[rows], classes):
            row_of = {
                str(label): int(rows[np.argmax(classes == number)])
                for number, label in enumerate(names)
            }
            return _cells(column).take(
                pa.array([row_of.get(str(truth)) for truth in added.truths], pa.int64())
            )
    return nothing


def _targets(cells: list[Any], old: RawColumn, data: DataParams) -> pa.Array:
    """The target of all rows, so that the old rows' cells say what they said."""
    if old.stored == "boolean" and {str(cell) for cell in cells} <= {"True", "False", "None"}:
        return pa.array(
            [None if cell is None else str(cell) == "True" for cell in cells], pa.bool_()
        )
    if is_classification(data.task):
        return pa.array([None if cell is None else label_of(cell) for cell in cells], pa.string())
    if any(isinstance(cell, str) for cell in cells):
        return pa.array([_text(cell) for cell in cells], pa.string())
    return pa.array(cells, pa.float64())


def _typed(column: RawColumn, data: DataParams) -> TypedColumn | None:
    """The column as `clean` reads it; None where it is ignored."""
    (guess,) = column_types({column.name: column}, data.columns)
    return None if guess.kind == "ignore" else typed_column(column, guess.kind)


def _together(old: pa.Array, new: pa.Array) -> pa.Array:
    """One column of both; as text where their types differ, which reads as the same values."""
    if old.type != new.type:
        old, new = (
            pa.array([_text(cell) for cell in cells.to_pylist()], pa.string())
            for cells in (old, new)
        )
    return pa.concat_arrays([old, new])


def _digests(table: RawTable, kinds: Mapping[str, str]) -> list[bytes]:
    """Of each row by the values of its inputs, which are of these kinds."""
    readers = {"boolean": _in_one_word, "date": _in_one_form, "category": _as_words}
    columns = [
        readers[kind](table.columns[name]) if kind in readers else table.columns[name]
        for name, kind in kinds.items()
    ]
    found, _ = row_digests(columns, np.arange(len(table.numbers)))
    return [digest.tobytes() for digest in found]


def _in_one_form(column: RawColumn) -> RawColumn:
    """A column of dates in whatever form of ISO 8601, as text: days since 1970 UTC."""
    typed = typed_column(column, "date")
    texts = [
        repr(float(days)) if state == GOOD else None
        for days, state in zip(typed.values[:-1], typed.states[:-1], strict=True)
    ]
    cells = [
        text or _text(cell) or ""
        for text, cell in zip(texts, column.values.to_pylist(), strict=True)
    ]
    return replace(column, stored="text", values=pa.array(cells, pa.string()))


def _as_words(column: RawColumn) -> RawColumn:
    """A column of categories as text that is no number: 0123 and 123 are two, as they are for `clean`."""
    typed = typed_column(column, "category")
    texts = [_text(cell) or "" for cell in column.values.to_pylist()]
    cells = [
        "" if state == MISSING else f"={text}"
        for text, state in zip(texts, typed.states[:-1], strict=True)
    ]
    return replace(column, stored="text", values=pa.array(cells, pa.string()))


def _in_one_word(column: RawColumn) -> RawColumn:
    """A column of booleans in whatever words, 1 and 0 among them, as text: true and false."""
    words = {
        **dict.fromkeys((*TRUE_WORDS, "1"), "true"),
        **dict.fromkeys((*FALSE_WORDS, "0"), "false"),
    }
    texts = [str(_text(cell)).lower() for cell in column.values.to_pylist()]
    return replace(
        column,
        stored="text",
        values=pa.array([words.get(text, text) for text in texts], pa.string()),
    )


def _cells(column: RawColumn) -> pa.Array:
    """(N,) the cells of a raw column, null where there is none."""
    cells = column.values.take(pa.array(column.codes, mask=column.codes < 0))
    return cells if column.stored == "other" else cells.cast(_ARROW[column.stored])


def _truths(cells: Any, data: DataParams) -> list[str | float | None]:
    """Labels as `data.label_map` means them, or numbers; None where there is none, or none that is a number."""
    if is_classification(data.task):
        texts = [None if cell is None else label_of(cell).strip() for cell in cells.to_pylist()]
        return [spelled(text, data.label_map)[0] if text else None for text in texts]
    return [_number(cell) for cell in cells.to_pylist()]


def _number(cell: Any) -> float | None:
    try:
        return None if cell is None else float(cell)
    except ValueError:
        return None


def _text(cell: Any) -> str | None:
    """A cell as a CSV has it; a whole number without a point."""
    if cell is None:
        return None
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() else repr(cell)
    return str(cell).strip() or None


def _columns(table: pa.Table, names: Iterable[str], path: Path) -> Mapping[str, Any]:
    absent = [name for name in names if name not in table.column_names]
    if absent:
        raise DataError(
            f"{path} has the columns {', '.join(table.column_names)}, expected {', '.join(absent)} among them."
        )
    return {name: table[name] for name in table.column_names}


if __name__ == "__main__":
    run_command(main)
