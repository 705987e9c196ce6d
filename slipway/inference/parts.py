"""Stores finished parts of a prediction file, so that a killed run can resume.

DESTINATION.parts/manifest.json    the model, the source and the format; a run with others fails
DESTINATION.parts/00000007.part    the content of one part
DESTINATION.parts/00000007.json    written after the part: its rows and faults. Without this file,
                                   the part counts as missing
DESTINATION.parts/complete         written after the last part; the destination may exist already
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from slipway.system import files
from slipway.system.contract import Contract, parse_record
from slipway.system.errors import DataError

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
COMPLETE = "complete"


class PartRecord(Contract):
    """The record of one finished part: its number of rows, and its faults by code."""

    rows: int
    faults: dict[str, int]  # rows without an answer, by code


class PartsManifest(Contract):
    """Everything that determines the content of the parts. A resumed run must have the same."""

    format_version: Literal[1]
    model: str  # digest of the bundle
    execution: dict[str, str]
    batch_size: int
    source: str  # its identity
    piece_rows: int


class PartsFolder:
    """The folder with the parts of one destination."""

    def __init__(self, destination: Path) -> None:
        self.folder = destination.with_name(f"{destination.name}.parts")

    @contextmanager
    def opened(self, manifest: PartsManifest) -> Iterator[list[PartRecord]]:
        """Lock the folder and yield the records of the finished parts.

        Raises DataError if the parts are of another model, source or format.
        """
        with files.lock(self.folder / "lock", f"predicting into {self.folder.stem}"):
            path = self.folder / MANIFEST
            if path.exists():
                self._require_same(path, manifest)
            else:
                files.write_json(path, manifest.model_dump(mode="json"))
            yield list(self._records())

    @property
    def is_complete(self) -> bool:
        """True if every part is written."""
        return (self.folder / COMPLETE).exists()

    def complete(self) -> None:
        """Write the marker file which says that every part is written."""
        files.write_bytes(self.folder / COMPLETE, b"")

    def write(
        self, number: int, content: bytes, rows: int, faults: Mapping[str, int]
    ) -> PartRecord:
        """Write the content of one part, then its record, which marks the part as finished."""
        record = PartRecord(rows=rows, faults=dict(faults))
        files.write_bytes(self.path(number), content)
        files.write_json(self._record(number), record.model_dump(mode="json"))
        return record

    def path(self, number: int) -> Path:
        """Return the path of a part."""
        return self.folder / f"{number:08d}.part"

    def _record(self, number: int) -> Path:
        return self.path(number).with_suffix(".json")

    def _records(self) -> Iterator[PartRecord]:
        number = 0
        while (path := self._record(number)).exists():
            yield parse_record(PartRecord, path, path.read_bytes(), DataError, self._fix)
            number += 1

    @property
    def _fix(self) -> str:
        return f"Remove {str(self.folder)!r} to start again."

    def _require_same(self, path: Path, manifest: PartsManifest) -> None:
        found: dict[str, Any] = json.loads(path.read_bytes())
        expected = manifest.model_dump(mode="json")
        other = [name for name, value in expected.items() if found.get(name) != value]
        if other:
            raise DataError(
                f"{str(self.folder)!r} holds unfinished answers of a run with another "
                f"{', '.join(other)}. {self._fix}"
            )
