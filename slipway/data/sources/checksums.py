"""The user's own list of digests, as `sha256sum` writes it: the only check that finds a flipped byte in a picture that still decodes.

Every file that is gone, altered or not listed is named.
"""

import codecs
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipway.data.sources.shards import table_files
from slipway.system import files
from slipway.system.errors import DataError

_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
_ESCAPED = {"\\n": "\n", "\\r": "\r", "\\\\": "\\"}
_MAX_SHOWN = 5


@dataclass(frozen=True)
class ChecksumList:
    """The user's checksums: `names` relative to `root`, and the digest of each (32 bytes)."""

    path: Path
    root: Path
    names: pa.Array
    digests: pa.Array

    def check(self, facts: pa.Table) -> pa.Table:
        """Return FACTS with a rule for each file that differs from the list or is missing."""
        sources = facts["source"].combine_chunks()
        names = _names(sources, self.names)
        places = pc.index_in(names, self.names)
        expected = self.digests.take(places)
        has_bytes = pc.is_valid(facts["sha256"])
        # Images inside a table have a name at most, no file.
        unlisted = np.array(pc.and_(pc.is_null(places), has_bytes))
        for index in np.flatnonzero(unlisted):
            unlisted[index] = any(
                (self.root / name[index].as_py()).is_file() for name in (names, sources)
            )
        not_listed = pa.array(unlisted)
        altered = pc.fill_null(
            pc.not_equal(facts["sha256"].combine_chunks().cast(pa.binary()), expected), False
        )
        rule, detail = facts["rule"].combine_chunks(), facts["detail"].combine_chunks()
        sound = pc.is_null(rule)
        also = pc.if_else(altered, "; its SHA-256 is not the one in data.checksums, either", "")
        detail = pc.if_else(sound, detail, pc.binary_join_element_wise(detail, also, ""))
        for broken, name, text in (
            (
                altered,
                "digest_mismatch",
                f"its SHA-256 is not the one in {self.path}: the bytes were altered after it was listed",
            ),
            (not_listed, "not_listed", f"{self.path} does not list it"),
        ):
            newly = pc.and_(sound, broken)
            rule, detail = pc.if_else(newly, name, rule), pc.if_else(newly, text, detail)
        facts = facts.set_column(facts.schema.get_field_index("rule"), "rule", rule)
        facts = facts.set_column(facts.schema.get_field_index("detail"), "detail", detail)
        return pa.concat_tables([facts, self._others(names, facts.schema)])

    def check_table(self, table: Path) -> None:
        """DataError if a file of the table differs from the list or is not listed."""
        for path in table_files(table):
            self._check_file(path)

    def _check_file(self, path: Path) -> None:
        name = path.relative_to(self.root).as_posix()
        place = self.names.index(name).as_py()
        if place < 0:
            raise DataError(
                f"data.checksums {str(self.path)!r} does not list {name!r}. List it, or set data.checksums to null."
            )
        if files.sha256_file(path) != self.digests[place].as_py().hex():
            raise DataError(
                f"{str(path)!r} was altered after it was listed: its SHA-256 is not the one in {self.path}. Put it back or list it anew."
            )

    def _others(self, seen: pa.Array, schema: pa.Schema) -> pa.Table:
        """Return a row for each listed file that is no sample and is missing or altered."""
        unseen = np.flatnonzero(np.asarray(pc.invert(pc.is_in(self.names, seen))))
        records = [
            record
            for index in unseen
            if (record := self._other(self.names[index].as_py(), self.digests[index].as_py()))
        ]
        return pa.Table.from_pylist(records, schema=schema)

    def _other(self, name: str, digest: bytes) -> dict[str, Any] | None:
        path = self.root / name
        empty: dict[str, Any] = {"source": name, "corrections": [], "flags": [], "flag_details": []}
        if not path.is_file():
            return empty | {
                "rule": "missing_file",
                "detail": f"{self.path} lists it, but {path} does not exist",
            }
        if files.sha256_file(path) != digest.hex():
            return empty | {
                "rule": "digest_mismatch",
                "detail": f"its SHA-256 is not the one in {self.path}",
            }
        return None


def read_checksums(path: Path, data_path: Path) -> ChecksumList:
    """Read `data.checksums`; DataError naming every line that is not one of sha256sum's, and every file listed twice."""
    try:
        lines = _lines(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"data.checksums {str(path)!r} cannot be read: {error}. Expected lines of `sha256sum`, or null."
        ) from error
    listed: dict[str, str] = {}
    faults = []
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            faults += (
                [f"  line {number}: {line[:80]!r} is not 'SHA-256  path'"] if line.strip() else []
            )
        elif listed.setdefault(name := _name(match), match[2].lower()) != match[2].lower():
            faults.append(f"  line {number}: {name!r} is listed before with another digest")
    if faults or not listed:
        shown = "\n".join(faults[:_MAX_SHOWN]) or "  it lists no file"
        raise DataError(
            f"data.checksums {str(path)!r} has {len(faults)} bad lines, expected what `sha256sum` writes:\n{shown}"
        )
    root = data_path if data_path.is_dir() else data_path.parent
    digests = pa.array([bytes.fromhex(digest) for digest in listed.values()], pa.binary())
    return ChecksumList(path, root, pa.array(list(listed), pa.string()), digests)


def _lines(content: bytes) -> list[str]:
    """Split into lines, without a BOM or carriage returns; names are spelled as in `folders`."""
    text = content.removeprefix(codecs.BOM_UTF8).decode(errors="backslashreplace")
    return [
        line.removesuffix("\r") for line in text.split("\n")
    ]  # not splitlines: a name may hold other separators


def _name(match: re.Match[str]) -> str:
    """Return the name in a line, after undoing the escapes of sha256sum."""
    name = re.sub(r"\\[nr\\]", lambda found: _ESCAPED[found[0]], match[3]) if match[1] else match[3]
    return name.removeprefix("./")


def _names(sources: pa.Array, listed: pa.Array) -> pa.Array:
    """Return sources without the row number of a table, unless a listed name has it."""
    return pc.if_else(
        pc.is_in(sources, listed), sources, pc.replace_substring_regex(sources, r"^\d+:", "")
    )
