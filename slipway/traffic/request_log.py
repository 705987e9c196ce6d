"""Reads and writes the request log: requests and their predictions, in a folder of bounded size.

FOLDER/BEGIN-RANDOM.jsonl    one segment: one JSON object per request and line

Each writer appends to its own segment, so a killed writer leaves at most one torn line, its last.
Old segments are removed as a whole. Nothing that a caller sent becomes part of a path. There is no
index: finding a request reads all segments.
"""

import base64
import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AwareDatetime, ValidationError

from slipway.artifacts.certificate import Execution
from slipway.system import files
from slipway.system.contract import Contract
from slipway.system.errors import IntegrityError

FORMAT_VERSION = 2
# Fields of answers and outputs that format 1 names differently; old lines must stay readable.
_FORMAT_1_NAMES = {"outlier_score": "ood_score", "is_outlier": "is_ood"}
REPLAYED = "replay-"  # prefix of the ids of replayed requests, which are not logged again
_LARGEST_SEGMENT = 64 << 20  # bytes of the largest segment
_SEGMENTS_PER_WRITER = 8  # fewest segments, so that a removal frees at most an eighth of the bound
_SEGMENTS_PER_AGE = 24  # a segment takes requests for at most 1/24 of the age limit
_BEGIN = "%Y%m%dT%H%M%S.%fZ"
_SEGMENT = re.compile(r"(\d{8}T\d{6}\.\d{6}Z)-[0-9a-f]{8}\.jsonl")
_FLOAT32 = np.dtype("<f4")
RequestRows = Mapping[str, frozenset[int] | None]  # rows by request id; None: all of them
_JSON = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class LoggedRequest:
    """One request that the model answered."""

    request_id: str  # callers may choose it, so it need not be unique
    time: datetime  # UTC, when it was answered
    bundle_digest: str  # hex SHA-256 of bundle.json
    execution: Execution  # how the model ran
    content_type: str  # send `payload` to `/predict` with this content type to repeat the request
    # An encoded image, several images (slipway/inputs/multipart.py), or the JSON text of rows.
    payload: bytes
    is_list: bool  # True if the caller sent a list of rows, or several images
    inputs_sha256: str  # `digest_inputs` of the pixels or encoded rows that the model took
    outputs: dict[str, NDArray[np.float32]]  # (rows, ...) by the graph's output name, bit for bit
    answers: list[dict[str, Any]]  # one for each row, as the caller received it
    erased: tuple[int, ...] = ()  # rows that were removed; their answers and outputs are empty

    @property
    def model_version(self) -> str:
        """Model version as responses state it: the first 12 hex digits of `bundle_digest`."""
        return self.bundle_digest[:12]

    @property
    def num_rows(self) -> int:
        """Return the number of rows in the request; 1 for an image."""
        return len(self.answers)


@dataclass(frozen=True)
class DamagedLine:
    """A line of a log whose content does not match its digest or its format."""

    segment: Path
    line: int  # counted from 1
    reason: str

    def __str__(self) -> str:
        return f"line {self.line} of {self.segment} was altered: {self.reason}"


class _Outputs(Contract):
    shape: list[int]
    float32: str  # base64 of the little-endian bytes in C order


class StoredRequest(Contract):
    """The JSON form of one log line. `request_id` comes first, so a prefix finds the line."""

    request_id: str
    format_version: Literal[1, 2]
    time: AwareDatetime
    model_version: str
    bundle_digest: str
    execution: Execution
    content_type: str
    is_list: bool
    answers: list[dict[str, Any]]
    outputs: dict[str, _Outputs]
    inputs_sha256: str
    sha256: str  # SHA-256 of the payload
    payload: str  # base64
    erased: tuple[int, ...] = ()


def has_row(rows: RequestRows, request_id: str, item: int) -> bool:
    """Return True if `rows` contains the row with the number `item` of a request."""
    items = rows.get(request_id, frozenset())
    return items is None or item in items


def digest_inputs(inputs: NDArray[Any]) -> str:
    """Return the hex SHA-256 of decoded inputs. Equal digests mean bit-identical inputs."""
    return hashlib.sha256(np.ascontiguousarray(inputs).data).hexdigest()


def encode_line(request: LoggedRequest) -> bytes:
    """Return the request as a line of JSON. Raises ValueError if JSON cannot hold a prediction."""
    content = {
        "request_id": request.request_id,
        "format_version": FORMAT_VERSION,
        "time": request.time.isoformat(timespec="microseconds"),
        "model_version": request.model_version,
        "bundle_digest": request.bundle_digest,
        "execution": request.execution.model_dump(),
        "content_type": request.content_type,
        "is_list": request.is_list,
        "answers": request.answers,
        "outputs": {name: _encode_outputs(outputs) for name, outputs in request.outputs.items()},
        "inputs_sha256": request.inputs_sha256,
        "sha256": files.sha256_bytes(request.payload),
        "payload": base64.b64encode(request.payload).decode(),
        **({"erased": request.erased} if request.erased else {}),
    }
    return _JSON.encode(content).encode() + b"\n"


def decode_line(line: bytes) -> LoggedRequest:
    """Return the request of one line; ValueError if it is damaged."""
    content = StoredRequest.model_validate_json(line)
    payload = base64.b64decode(content.payload, validate=True)
    if files.sha256_bytes(payload) != content.sha256:
        raise ValueError("the payload's SHA-256 does not match")
    names = _FORMAT_1_NAMES if content.format_version == 1 else {}
    return LoggedRequest(
        request_id=content.request_id,
        time=content.time,
        bundle_digest=content.bundle_digest,
        execution=content.execution,
        content_type=content.content_type,
        payload=payload,
        is_list=content.is_list,
        inputs_sha256=content.inputs_sha256,
        outputs={
            names.get(name, name): _decode_outputs(outputs)
            for name, outputs in content.outputs.items()
        },
        answers=[
            {names.get(name, name): value for name, value in answer.items()}
            for answer in content.answers
        ],
        erased=content.erased,
    )


def read_requests(folder: Path) -> Iterator[LoggedRequest | DamagedLine]:
    """Yield every logged request or damaged line, the oldest segment first.

    Skips an incomplete last line: its writer was killed or is still writing.
    """
    for segment, number, line in _lines(folder, b""):
        yield _decoded(segment, number, line)


def find_requests(folder: Path, request_id: str) -> list[LoggedRequest]:
    """Return the requests with this id, the oldest first; IntegrityError if one is damaged."""
    found = [_decoded(*place) for place in _lines(folder, _beginning(request_id))]
    for request in found:
        if isinstance(request, DamagedLine):
            raise IntegrityError(
                f"{request}. It cannot be replayed; remove the line, or choose another request."
            )
    return sorted(
        (request for request in found if isinstance(request, LoggedRequest)),
        key=lambda request: request.time,
    )


def segments(folder: Path) -> list[Path]:
    """Return the segments in a folder, the oldest first; ignore other files."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _SEGMENT.fullmatch(path.name))


class SegmentWriter:
    """Appends lines to segments, and keeps the folder within its limits; for use by one thread.

    All `num_writers` together never exceed `max_bytes`. If `tidy` is called regularly, no request
    is kept longer than `max_age_s`. Nothing is created before the first request. Methods raise
    OSError if the disk cannot be written.
    """

    def __init__(
        self, root: Path, max_bytes: int, num_writers: int, max_age_s: float | None = None
    ) -> None:
        self.root = root
        self.segment_bytes = min(
            _LARGEST_SEGMENT, max_bytes // (_SEGMENTS_PER_WRITER * num_writers)
        )
        self._max_bytes = max_bytes
        self._num_writers = num_writers
        self._max_age_s = max_age_s
        self._descriptor: int | None = None  # descriptor of the open segment
        self._size = 0
        self._begun = 0.0

    def append(self, lines: bytes) -> None:
        """Append complete lines of at most `segment_bytes` together.

        An OSError means none was stored.
        """
        if self._descriptor is not None and (
            self._size + len(lines) > self.segment_bytes or self._is_old()
        ):
            self.close()
        descriptor = self._descriptor if self._descriptor is not None else self._begin()
        try:
            written = 0
            while written < len(lines):
                written += os.write(descriptor, memoryview(lines)[written:])
        except OSError:
            self._give_up(descriptor)
            raise
        self._size += len(lines)

    def tidy(self) -> None:
        """Close this writer's segment if it is old, and remove segments above the age limit."""
        if self._is_old():
            self.close()
        if self._max_age_s is not None and self.root.is_dir():
            with self._locked():
                self._make_room(0)

    def close(self) -> None:
        """Close the segment; the next request starts another."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _begin(self) -> int:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            self._make_room(1)
            path = self.root / f"{datetime.now(UTC).strftime(_BEGIN)}-{secrets.token_hex(4)}.jsonl"
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW, 0o600
            )
            # Marks the segment as open; the kernel releases the lock when the process ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._descriptor, self._path, self._size, self._begun = descriptor, path, 0, time.time()
        return descriptor

    def _give_up(self, descriptor: int) -> None:
        """Truncate a partly written line, and close the segment."""
        with suppress(OSError):
            os.ftruncate(descriptor, self._size)
            if self._size == 0:
                self._path.unlink()
        with suppress(OSError):
            self.close()
        self._descriptor = None

    def _is_old(self) -> bool:
        if self._descriptor is None or self._max_age_s is None:
            return False
        return time.time() - self._begun > self._max_age_s / _SEGMENTS_PER_AGE

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder: only one writer at a time may remove or start segments."""
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, num_new: int) -> None:
        """Remove the oldest segments until all open and new ones can grow to full size."""
        closed: list[tuple[Path, int]] = []
        num_open = num_new
        for path in segments(self.root):
            size = size_if_closed(path)
            if size is None:
                num_open += 1
            elif self._is_expired(path):
                path.unlink(missing_ok=True)
            else:
                closed.append((path, size))
        excess = (
            sum(size for _, size in closed)
            + max(num_open, self._num_writers) * self.segment_bytes
            - self._max_bytes
        )
        for path, size in closed:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size

    def _is_expired(self, path: Path) -> bool:
        match = _SEGMENT.fullmatch(path.name)
        if match is None or self._max_age_s is None:
            return False
        begun = datetime.strptime(match[1], _BEGIN).replace(tzinfo=UTC).timestamp()
        return time.time() - begun > self._max_age_s * (1 - 1 / _SEGMENTS_PER_AGE)


def size_if_closed(path: Path) -> int | None:
    """Return the size in bytes of a segment; None if a writer has it open."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_size
    except BlockingIOError:
        return None
    finally:
        os.close(descriptor)


def _lines(folder: Path, beginning: bytes) -> Iterator[tuple[Path, int, bytes]]:
    """Yield (segment, line number, line) of each complete line with this prefix."""
    for segment in segments(folder):
        # A segment may be removed meanwhile.
        with suppress(FileNotFoundError), segment.open("rb") as file:
            for number, line in enumerate(file, start=1):
                is_erased = line.isspace()  # slipway/traffic/erasure.py erased it
                if line.startswith(beginning) and line.endswith(b"\n") and not is_erased:
                    yield segment, number, line


def _beginning(request_id: str) -> bytes:
    return f'{{"request_id":{json.dumps(request_id, ensure_ascii=False)},'.encode()


def _decoded(segment: Path, number: int, line: bytes) -> LoggedRequest | DamagedLine:
    try:
        return decode_line(line)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        return DamagedLine(segment, number, f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}")
    except ValueError as error:
        return DamagedLine(segment, number, str(error))


def _encode_outputs(outputs: NDArray[np.float32]) -> dict[str, Any]:
    return {
        "shape": outputs.shape,
        "float32": base64.b64encode(np.ascontiguousarray(outputs, _FLOAT32).data).decode(),
    }


def _decode_outputs(outputs: _Outputs) -> NDArray[np.float32]:
    content = base64.b64decode(outputs.float32, validate=True)
    return np.frombuffer(content, _FLOAT32).reshape(outputs.shape).astype(np.float32)
