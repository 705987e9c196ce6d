"""Reads the sizes of the pictures in a HEIC or an AVIF before any pixel is decoded.

The decoders trust different headers: libheif decodes no picture that is larger than its box `ispe`,
but libavif uses the size in the AV1 stream. So both sizes are read, to refuse decompression bombs.
Formats: ISO/IEC 14496-12 and 23008-12 (boxes), "AV1 Bitstream & Decoding Process Specification" of
2019, sections 5.3 to 5.9.
"""

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_PARTS = 10_000  # boxes in a box, and parts of AV1 streams; a photo has a few dozen
_ISPE_BYTES = 12
_SEQUENCE, _FRAME_HEADER, _FRAME = 1, 3, 6  # kinds of parts of an AV1 stream
_SELECTED = 2  # frames have a bit for it
_SHOWN_KEY_FRAME = 0b001

Span = tuple[int, int]  # begin and end among the bytes of a file


class _Sequence(NamedTuple):
    """The sequence header of an AV1 stream, which its frame headers refer to."""

    size: tuple[int, int]  # width and height, unless a frame overrides them
    largest: tuple[int, int]  # largest size with which a frame can override them
    is_still: bool  # frames cannot override the size
    screen_tools: int = 0
    integer_vectors: int = 0
    id_bits: int = 0


def stated_sizes(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yield the width and height in pixels that each box `ispe` states.

    Raises ValueError or struct.error if the file is damaged.
    """
    properties = _inside(payload, _inside(payload, _meta(payload), b"iprp"), b"ipco")
    for begin, end in _inside(payload, properties, b"ispe"):
        if end - begin >= _ISPE_BYTES:
            yield struct.unpack_from(">4xII", payload, begin)


def av1_sizes(payload: bytes) -> Iterator[tuple[int, int]]:
    """Yield the width and height in pixels of each AV1 frame in an AVIF.

    Raises ValueError, LookupError or struct.error if the file is damaged or has no frame.
    """
    streams = list(_av1_streams(payload))
    if not streams or sum(map(len, streams)) > 4 * len(payload):
        raise ValueError("it has no AV1 stream, or many share their bytes")
    num_parts = 0
    for stream in streams:
        sequence = None
        for kind, content in _parts(stream):
            num_parts += 1
            if num_parts > MAX_PARTS:
                raise ValueError(f"it has more than {MAX_PARTS} parts")
            if kind == _SEQUENCE:
                sequence = _read_sequence(_bits(content))
            elif kind in (_FRAME_HEADER, _FRAME):
                if sequence is None:
                    raise ValueError("it has a frame before its sequence header")
                yield _frame_size(_bits(content), sequence)
        if sequence is None:
            raise ValueError("it has an AV1 stream without a sequence header")


def _boxes(payload: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the boxes between two byte positions: kind, and begin and end of their content."""
    for _ in range(MAX_PARTS):
        if begin + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", payload, begin)
        content = begin + 8
        if size == 1:  # 64 bits follow
            size, content = int.from_bytes(payload[content : content + 8]), content + 8
        stop = min(begin + size, end) if size else end
        yield kind, content, stop
        begin = max(stop, content)
    raise ValueError(f"it has more than {MAX_PARTS} boxes")


def _inside(payload: bytes, parents: list[Span], wanted: bytes) -> list[Span]:
    return [
        (begin, end)
        for parent in parents
        for kind, begin, end in _boxes(payload, *parent)
        if kind == wanted
    ]


def _meta(payload: bytes) -> list[Span]:
    return [(begin + 4, end) for begin, end in _inside(payload, [(0, len(payload))], b"meta")]


def _av1_streams(payload: bytes) -> Iterator[bytes]:
    """Yield the bytes of each item of type `av01`, from the positions in the box `iloc`."""
    meta = _meta(payload)
    items: set[int] = set()
    for begin, end in _inside(payload, meta, b"iinf"):
        first = begin + (8 if payload[begin] else 6)
        for entry, _ in _inside(payload, [(first, end)], b"infe"):
            layout = ">4xI2x4s" if payload[entry] > 2 else ">4xH2x4s"
            number, kind = struct.unpack_from(layout, payload, entry)
            items.update({number} if kind == b"av01" else ())
    origins = dict(enumerate([0, *(begin for begin, _ in _inside(payload, meta, b"idat"))]))
    for begin, end in _inside(payload, meta, b"iloc"):
        for number, origin, extents in _locations(payload[begin:end]):
            if number in items:
                spans = [(origins[origin] + offset, length) for offset, length in extents]
                if any(not 0 < length <= len(payload) - offset for offset, length in spans):
                    raise ValueError("it has pixels beyond the end of the file")
                yield b"".join(payload[offset : offset + length] for offset, length in spans)


def _locations(iloc: bytes) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Parse the box `iloc`. Yields for each item its number, construction method and extents.

    An extent is (offset, length) in bytes.
    """
    version, at = iloc[0], 6

    def number(num_bytes: int) -> int:
        nonlocal at
        at += num_bytes
        if at > len(iloc):
            raise ValueError("its box iloc is damaged")
        return int.from_bytes(iloc[at - num_bytes : at])

    offset_bytes, length_bytes, base_bytes = iloc[4] >> 4, iloc[4] & 15, iloc[5] >> 4
    index_bytes = iloc[5] & 15 if version else 0
    long = 4 if version > 1 else 2
    for _ in range(number(long)):
        item = number(long)
        origin = number(2) & 15 if version else 0
        number(2)  # the file that has the bytes: this one
        base = number(base_bytes)
        extents = []
        for _ in range(number(2)):
            number(index_bytes)
            extents.append((base + number(offset_bytes), number(length_bytes)))
        yield item, origin, extents


def _parts(stream: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the content of each part of an AV1 stream (open bitstream unit)."""
    at = 0
    while at < len(stream):
        head = stream[at]
        at += 1 + (head >> 2 & 1)
        length = len(stream) - at
        if head & 2:
            length = 0
            for shift in range(0, 56, 7):
                length |= (stream[at] & 127) << shift
                at += 1
                if stream[at - 1] < 128:
                    break
        yield head >> 3 & 15, stream[at : min(at + length, at + 256)]
        at += length


def _bits(content: bytes) -> Callable[[int], int]:
    """Return a function that reads the next N bits of `content` as an unsigned number."""
    at, value, num_bits = 0, int.from_bytes(content), 8 * len(content)

    def read(count: int) -> int:
        nonlocal at
        at += count
        if at > num_bits:
            raise ValueError("an AV1 header is cut off")
        return value >> num_bits - at & (1 << count) - 1

    return read


def _read_sequence(read: Callable[[int], int]) -> _Sequence:
    read(3)  # profile
    read(1)
    is_still = bool(read(1))
    if is_still:
        read(5)  # level
    elif read(1):
        raise ValueError("its AV1 stream is timed like a video")
    else:
        has_delay = read(1)
        for _ in range(read(5) + 1):
            read(12)
            if read(5) > 7:
                read(1)
            if has_delay and read(1):
                read(4)
    width_bits, height_bits = read(4) + 1, read(4) + 1
    size = read(width_bits) + 1, read(height_bits) + 1
    if is_still:
        return _Sequence(size, size, True)
    id_bits = read(4) + read(3) + 3 if read(1) else 0
    read(7)
    if read(1):  # order of frames
        read(2)
    screen_tools = _SELECTED if read(1) else read(1)
    integer_vectors = _SELECTED if not screen_tools or read(1) else read(1)
    largest = 1 << width_bits, 1 << height_bits
    return _Sequence(size, largest, False, screen_tools, integer_vectors, id_bits)


def _frame_size(read: Callable[[int], int], sequence: _Sequence) -> tuple[int, int]:
    """Return width and height of a frame, or the stream's maximum if its header is unusual."""
    if sequence.is_still:
        return sequence.size
    if read(1):  # shows a decoded frame again
        return (0, 0)
    if read(3) != _SHOWN_KEY_FRAME:
        return sequence.largest
    read(1)
    has_tools = read(1) if sequence.screen_tools == _SELECTED else sequence.screen_tools
    if has_tools and sequence.integer_vectors == _SELECTED:
        read(1)
    read(sequence.id_bits)
    return sequence.largest if read(1) else sequence.size
