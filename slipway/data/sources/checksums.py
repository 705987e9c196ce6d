"""Checks the data against the user's own checksums, in the format of `sha256sum`.

Only checksums reveal a flipped byte in an image that still decodes. Every file that is missing,
altered or not listed is named.
"""

import codecs
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipway.config.sections import DataParams
from slipway.data.sources.joined import image_folders
from slipway.data.sources.shards import table_files
from slipway.system import files
from slipway.system.errors import DataError

_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)", re.DOTALL)
_ESCAPED = {"\\n": "\n", "\\r": "\r", "\\\\": "\\"}
_MAX_SHOWN = 5


@dataclass(frozen=True)
class ChecksumList:
    """The user's checksums: file `names` relative to `root`, and the digest of each (32 bytes)."""

    path: Path
    root: Path
    names: pa.Array
    digests: pa.Array
    folders: Mapping[str, str]  # `joined.image_folders`

    def check(self, facts: pa.Table) -> pa.Table:
        """Return FACTS, with a rule for each file that is missing or differs from the list."""
        sources = facts["source"].combine_chunks()
        names = names_of_files(sources, self.names, self.folders)
        positions = pc.index_in(names, self.names)
        sha256 = facts["sha256"].combine_chunks().cast(pa.binary())
        is_altered = pc.fill_null(pc.not_equal(sha256, self.digests.take(positions)), False)

        rule, detail = facts["rule"].combine_chunks(), facts["detail"].combine_chunks()
        is_sound = pc.is_null(rule)
        note = pc.if_else(is_altered, "; its SHA-256 is not the one in data.checksums, either", "")
        detail = pc.if_else(is_sound, detail, pc.binary_join_element_wise(detail, note, ""))
        altered = (
            f"its SHA-256 is not the one in {self.path}: the bytes were altered after it was listed"
        )
        for is_broken, name, text in (
            (is_altered, "digest_mismatch", altered),
            (
                self._is_unlisted(positions, sha256, names, sources),
                "not_listed",
                f"{self.path} does not list it",
            ),
        ):
            is_refused = pc.and_(is_sound, is_broken)
            rule = pc.if_else(is_refused, name, rule)
            detail = pc.if_else(is_refused, text, detail)
        facts = facts.set_column(facts.schema.get_field_index("rule"), "rule", rule)
        facts = facts.set_column(facts.schema.get_field_index("detail"), "detail", detail)
        others = pa.Table.from_pylist(list(self._other_faults(names)), schema=facts.schema)
        return pa.concat_tables([facts, others])

    def _is_unlisted(
        self, positions: pa.Array, sha256: pa.Array, names: pa.Array, sources: pa.Array
    ) -> pa.Array:
        """Return a mask (N,) of the files that are not listed, apart from images inside a table."""
        is_unlisted = np.array(pc.and_(pc.is_null(positions), pc.is_valid(sha256)))
        for row in np.flatnonzero(is_unlisted):
            paths = (self.root / names[row].as_py(), self.root / sources[row].as_py())
            is_unlisted[row] = any(path.is_file() for path in paths)
        return pa.array(is_unlisted)

    def check_table(self, table: Path) -> None:
        """Raise DataError if a file of the table is not listed or differs from the list."""
        for path in table_files(table):
            self._check_file(path)

    def _check_file(self, path: Path) -> None:
        name = path.relative_to(self.root).as_posix()
        position = self.names.index(name).as_py()
        if position < 0:
            raise DataError(
                f"data.checksums {str(self.path)!r} does not list {name!r}. "
                "List it, or set data.checksums to null."
            )
        if files.sha256_file(path) != self.digests[position].as_py().hex():
            raise DataError(
                f"{str(path)!r} was altered after it was listed: its SHA-256 is not the one in "
                f"{self.path}. Put it back, or list it again."
            )

    def _other_faults(self, seen: pa.Array) -> Iterator[dict[str, Any]]:
        """Yield a row of FACTS for each listed file that is no sample and is missing or altered."""
        is_unseen = pc.invert(pc.is_in(self.names, seen))
        names, digests = self.names.filter(is_unseen), self.digests.filter(is_unseen)
        for name, digest in zip(names.to_pylist(), digests.to_pylist(), strict=True):
            path = self.root / name
            if not path.is_file():
                rule = "missing_file"
                detail = f"{self.path} lists it, but {path} does not exist"
            elif files.sha256_file(path) != digest.hex():
                rule, detail = "digest_mismatch", f"its SHA-256 is not the one in {self.path}"
            else:
                continue
            empty: dict[str, Any] = {"corrections": [], "flags": [], "flag_details": []}
            yield {"source": name, "rule": rule, "detail": detail, **empty}


def read_checksums(path: Path, data: DataParams) -> ChecksumList:
    """Read the checksum file that `data.checksums` names.

    Raises DataError, which names every line that is not in the format of `sha256sum` and every file
    that is listed twice with different digests.
    """
    try:
        lines = _lines(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"data.checksums {str(path)!r} cannot be read: {error}. "
            "Expected lines of `sha256sum`, or null."
        ) from error
    listed: dict[str, str] = {}
    faults = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            faults.append(f"  line {number}: {line[:80]!r} is not 'SHA-256  path'")
            continue
        name, digest = _name(match), match[2].lower()
        if listed.setdefault(name, digest) != digest:
            faults.append(f"  line {number}: {name!r} is listed before with another digest")
    if faults or not listed:
        shown = "\n".join(faults[:_MAX_SHOWN]) or "  it lists no file"
        raise DataError(
            f"data.checksums {str(path)!r} has {len(faults)} bad lines, "
            f"expected what `sha256sum` writes:\n{shown}"
        )
    data_path = Path(data.path)
    root = data_path if data_path.is_dir() else data_path.parent
    digests = pa.array([bytes.fromhex(digest) for digest in listed.values()], pa.binary())
    names = pa.array(list(listed), pa.string())
    return ChecksumList(path, root, names, digests, image_folders(data))


def _lines(content: bytes) -> list[str]:
    """Split the content into lines, without BOM and carriage returns.

    Names are escaped as in `folders`.
    """
    text = content.removeprefix(codecs.BOM_UTF8).decode(errors="backslashreplace")
    # Not splitlines: a name may contain other separators.
    return [line.removesuffix("\r") for line in text.split("\n")]


def _name(match: re.Match[str]) -> str:
    name = re.sub(r"\\[nr\\]", lambda found: _ESCAPED[found[0]], match[3]) if match[1] else match[3]
    return name.removeprefix("./")


def names_of_files(sources: pa.Array, listed: pa.Array, folders: Mapping[str, str]) -> pa.Array:
    """Convert sources to file paths below `data.path`, without row numbers and table names.

    `listed` are the names in the checksum file, which may contain row numbers and table names.
    `folders` are those of joined tables (`joined.image_folders`).
    """
    names = pc.replace_substring_regex(sources, r"^\d+:", "")
    for table, folder in folders.items():
        begin = "" if folder == "." else f"{folder}/".replace("\\", r"\\")
        names = pc.replace_substring_regex(names, f"^{re.escape(table)}:", begin)
    return pc.if_else(pc.is_in(sources, listed), sources, names)
