"""Finds new rows that the base data already has, by digests of their content.

A merged file can name its first recent row, in its Parquet metadata. From there on its rows
describe the present traffic, and the drift reference is made of them (slipway/export/).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

_RECENT = b"slipway_recent_from"  # metadata key: the number of the first recent row, from 0
Label = str | float | None


@dataclass
class MergeReport:
    """The number of rows from either side, and points that a person should check."""

    num_base: int = 0
    num_added: int = 0
    added: list[int] = field(default_factory=list)  # indices of the added rows among the new rows
    num_duplicates: int = 0  # new rows whose content the base data has
    num_relabelled: int = 0  # duplicates that were collected earlier and got a new label
    conflicts: list[str] = field(default_factory=list)  # base rows with another label: both stay
    omitted: list[str] = field(default_factory=list)  # parts of the base data that are not written

    def recent_mark(self, recent_from: int | None, base: Path) -> dict[bytes, bytes]:
        """Return the metadata of the merged file; empty without a first recent row.

        Args:
            recent_from: the index of the first recent row among the new rows, the older ones first;
                None: the new rows continue those that the mark of `base` calls recent.
            base: the file of the base rows.
        """
        if recent_from is None:
            first = read_recent_mark(base)
        else:
            first = self.num_base + sum(index < recent_from for index in self.added)
        return {} if first is None else {_RECENT: str(first).encode()}


def read_recent_mark(path: Path) -> int | None:
    """Return the number of a Parquet file's first recent row, from 0; None without a mark."""
    if path.suffix != ".parquet" or not path.is_file():
        return None
    found = (pq.read_metadata(path).metadata or {}).get(_RECENT)
    return None if found is None else int(found)


class NewRows:
    """The new rows by the digest of their content; records which ones the base data lacks."""

    def __init__(
        self, digests: Iterable[bytes], labels: Sequence[Label], report: MergeReport
    ) -> None:
        self.labels = labels
        self._report = report
        self._duplicates: set[int] = set()
        self._by_digest: dict[bytes, int] = {}
        for index, digest in enumerate(digests):
            earlier = self._by_digest.get(digest)
            if earlier is None:
                self._by_digest[digest] = index
            elif labels[index] is not None or labels[earlier] is None:
                # Equal rows may be sent in several forms: the last one with a label counts.
                self._by_digest[digest] = index
                self._count_duplicate(earlier)
            else:
                self._count_duplicate(index)

    def label_for(self, digest: bytes, label: Label, source: str, *, was_collected: bool) -> Label:
        """Return the label that a row of the base data has after the merge.

        It is its own `label`, unless the new data has a row with the same `digest` and another
        label. Then it is the new label if the base row itself came from collected traffic
        (`was_collected`); otherwise the base row's label stays, and its `source` is reported as a
        conflict.
        """
        index = self._by_digest.get(digest)
        if index is None:
            return label
        newer = self.labels[index]
        if newer not in (None, label) and not was_collected:
            self._report.conflicts.append(source)
            return label
        self._count_duplicate(index)
        if newer in (None, label):
            return label
        self._report.num_relabelled += 1
        return newer

    def to_add(self) -> list[int]:
        """Return the indices of the new rows that the base data lacks."""
        return [index for index in range(len(self.labels)) if index not in self._duplicates]

    def _count_duplicate(self, index: int) -> None:
        self._duplicates.add(index)
        self._report.num_duplicates = len(self._duplicates)
