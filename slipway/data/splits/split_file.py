"""Reads `data.split_file`: the user's file with the split of each row.

It has two columns: `split`, and a column that identifies the rows. The second one is one of three:
`path`, the path of an image in the data; `row`, the number of a row from 0; or any column of the
table, whose values may occur in several rows. Each value is listed once, and each row must get a
split.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from slipway.config.sections import DataParams
from slipway.data.sources.checksums import names_of_files
from slipway.data.sources.image_tables import FILE_NAME, TABLES, missing_column
from slipway.data.sources.joined import image_folders
from slipway.data.sources.raw_tables import (
    RawColumn,
    RawTable,
    cell_text,
    is_row_index,
    read_raw_table,
)
from slipway.data.sources.shards import named_split
from slipway.data.sources.text_format import TextFormat
from slipway.kinds.registry import kind_of
from slipway.system.errors import DataError

SPLIT, PATH, ROW = "split", "path", "row"
_MAX_SHOWN = 3


@dataclass(frozen=True)
class SplitFile:
    """The split of each row in `names`, which are values of the column `key`."""

    path: Path
    key: str
    names: pa.Array
    splits: pa.Array
    folders: Mapping[str, str]  # `joined.image_folders`

    def assign(self, facts: pa.Table) -> pa.Table:
        """Return the facts of images (schema FACTS) with the column `given_split` filled in.

        Raises DataError if the file gives an image no split.
        """
        sources = facts["source"].combine_chunks()
        if self.key == ROW:
            names = pc.replace_substring_regex(sources, r"(?s)^(\d+):.*$", r"\1")
        elif self.key == PATH:
            names = names_of_files(sources, self.names, self.folders)
        else:
            raise self._error([f"its column {self.key!r} does not name images"])
        given = self._splits_of(names, pc.is_null(facts["rule"].combine_chunks()))
        return facts.set_column(facts.schema.get_field_index("given_split"), "given_split", given)

    def splits_in(self, table: RawTable, is_sound: NDArray[np.bool_]) -> NDArray[np.object_]:
        """Return the split of each row of a table, (N,). Raises DataError if one has none."""
        malformed = [str(number) for number, _ in table.malformed]
        if self.key in table.columns:
            names, num_unread = _texts(table.columns[self.key]), len(malformed)
        elif self.key == ROW:
            numbers = [*map(str, table.numbers.tolist()), *malformed]
            names, num_unread = pa.array(numbers, pa.string()), 0
            is_sound = np.append(is_sound, np.zeros(len(malformed), bool))
        else:
            found = missing_column(self.key, list(table.columns))
            raise self._error([f"its column {self.key!r} names rows by a column, {found}"])
        given = self._splits_of(names, pa.array(is_sound), num_unread)
        return np.array(given.to_pylist()[: len(table.numbers)], object)

    def _splits_of(self, names: pa.Array, is_sound: pa.Array, num_unread: int = 0) -> pa.Array:
        """Return the split of each name; `num_unread` counts the rows whose names are unknown."""
        given = self.splits.take(pc.index_in(names, self.names))
        unknown = self.names.filter(pc.invert(pc.is_in(self.names, names)))
        without = names.filter(pc.and_(is_sound, pc.is_null(given)))
        problems = []
        if len(unknown) > num_unread:
            problems.append(f"{len(unknown)} of its names match no row: {_shown(unknown)}")
        if len(without):
            problems.append(f"{len(without)} rows have no split in it: {_shown(without)}")
        if problems:
            raise self._error(problems)
        return given

    def _error(self, problems: Sequence[str]) -> DataError:
        lines = "".join(f"\n  {problem}" for problem in problems)
        return DataError(
            f"data.split_file {str(self.path)!r} does not fit the data:{lines}\n"
            f"Expected the column {SPLIT!r}, and one that names the rows: {PATH!r}, the path of "
            f"an image in the data; {ROW!r}, the number of a row from 0; or a column of the table."
        )


def read_split_file(data: DataParams) -> SplitFile | None:
    """Read the file `data.split_file`; return None if there is none.

    Raises DataError, which lists every fault inside the file.
    """
    if data.split_file is None:
        return None
    path = Path(data.split_file)
    if path.suffix.lower() not in TABLES or not path.is_file():
        raise DataError(
            f"data.split_file {str(path)!r} is not a file that ends in {' or '.join(TABLES)}. "
            "Correct the path, or set it to null."
        )
    try:
        table = read_raw_table(path, written=TextFormat(data.encoding))
    except DataError as error:
        raise DataError(str(error).replace("data.path", "data.split_file")) from error
    columns = [name for name in table.columns if not is_row_index(name)]
    keys = [name for name in columns if name != SPLIT]
    found = SplitFile(path, keys[0] if keys else "", pa.array([]), pa.array([]), {})
    if len(keys) != 1 or len(columns) != 2:
        raise found._error([f"it has the columns {', '.join(columns)}"])
    names, words = _texts(table.columns[keys[0]]), _texts(table.columns[SPLIT])
    splits = pa.array([word and named_split(word) for word in words.to_pylist()], pa.string())
    counts = pc.value_counts(names)
    twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1)).drop_null()
    problems = {
        "lines are malformed": [
            f"line of row {number}, {what}" for number, what in table.malformed
        ],
        "lines name no row": [number for number, name in enumerate(names.to_pylist()) if not name],
        "names are listed more than once": twice.to_pylist(),
        "names have another split than train, val or test": names.filter(
            pc.is_null(splits)
        ).to_pylist(),
    }
    if lines := [f"{len(of)} {text}: {_shown(of)}" for text, of in problems.items() if of]:
        raise found._error(lines)
    names_images = kind_of(data.task).input.has_pixels and keys[0] in (data.image_column, FILE_NAME)
    key = PATH if names_images else keys[0]
    return SplitFile(path, key, names, splits, image_folders(data))


def _texts(column: RawColumn) -> pa.Array:
    """Return the cells of a column as text, (N,); empty cells become null."""
    texts = [cell_text(value) or None for value in column.values.to_pylist()]
    codes = pa.array(column.codes, mask=column.codes < 0)
    return pa.array(texts, pa.string()).take(codes)


def _shown(names: Iterable[Any]) -> str:
    names = [name.as_py() if isinstance(name, pa.Scalar) else name for name in names]
    return ", ".join(map(repr, names[:_MAX_SHOWN])) + ", ..." * (len(names) > _MAX_SHOWN)
