"""What one request asks about, as it came: an encoded image, several, or the rows of a table as JSON."""

from dataclasses import dataclass

from slipway.inputs.multipart import encode_images
from slipway.kinds.registry import input_kind


@dataclass(slots=True)  # frozen, it would take four times as long to make
class Payload:
    """Read from a request and not decoded yet. Nobody changes it."""

    kind: str  # of the input
    items: tuple[bytes, ...]  # encoded images in the caller's order, or one JSON text

    @property
    def num_bytes(self) -> int:
        """Of all items."""
        return sum(map(len, self.items))

    def as_request(self) -> tuple[str, bytes]:
        """A content type and a body under which `/predict` takes the same once more."""
        kind = input_kind(self.kind)
        return encode_images(self.items) if kind.takes_files else (kind.content_type, self.items[0])
