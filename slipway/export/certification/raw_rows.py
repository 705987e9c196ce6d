"""Matches raw rows to the packed test rows, and checks that none changed or is missing."""

from collections.abc import Sequence

from slipway.system.errors import IntegrityError


class RawRowPositions:
    """Maps raw rows to their positions among packed rows; each position is returned once."""

    def __init__(self, ids: Sequence[str], sources: Sequence[str]) -> None:
        self._ids = ids
        self._missing = {source: position for position, source in enumerate(sources)}

    def take(self, source: str, row_id: str | None) -> int:
        """Return the position of a raw row; raises IntegrityError if it changed since packing."""
        position = self._missing.pop(source, None)
        if position is None or self._ids[position] != row_id:
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
