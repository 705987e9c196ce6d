"""What a model takes: one record per kind of input."""

from dataclasses import dataclass


@dataclass(frozen=True)
class InputKind:
    """A kind of input."""

    name: str  # `input.kind` of a bundle


IMAGES = InputKind(name="images")
COLUMNS = InputKind(name="columns")
