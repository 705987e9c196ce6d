"""Matches raw rows to the packed test rows, and checks that none changed or is missing."""

from collections.abc import Sequence

from slipway.data.engine.rows import content_of
from slipway.system.errors import IntegrityError


class RawRowPositions:
    """Maps raw rows to their positions among packed rows; each position is returned once."""

    def __init__(self, ids: Sequence[str], sources: Sequence[str]) -> None:
        self._ids = ids
        self._missing = {source: position for position, source in enumerate(sources)}

    def take(self, source: str, content: str | None) -> int:
        """Return the position of a raw row, whose id begins with the digest `content`.

        Raises IntegrityError if the row has changed since packing.
        """
        position = self._missing.pop(source, None)
        if position is None or content_of(self._ids[position]) != content:
            raise IntegrityError(
                f"{source} changed since it was packed. "
                "Run `slipway run`, which starts at the changed data."
            )
        return position

    def check_all_taken(self) -> None:
        """Raise IntegrityError if a packed row is missing from the raw data."""
        if self._missing:
            raise IntegrityError(
                f"{len(self._missing)} test rows are gone from the raw data, "
                f"the first is {min(self._missing)}. Run `slipway run`."
            )
