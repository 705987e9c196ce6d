"""Arrays and tables in unnamed temporary files, so that memory does not grow with the rows.

The kernel may evict their pages at any time. The files vanish when the process ends, even if it is
killed. Sorting, selecting and grouping work slice by slice; only the rows of one key must fit in
memory.
"""

import ctypes
import errno
import hashlib
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Keys = NDArray[np.uint64]

_FOLDER = Path(".work/clean")
_SLICE_ROWS = 1 << 16
_BATCH_ROWS = 1 << 14
_HELD_ROWS = 1 << 12  # rows of a growing table that are held in memory
_BATCH_BYTES = 1 << 26  # Arrow joins no column of text of 2^31 bytes and more into one piece
_SMALLEST_FILE_BYTES = 1 << 18
_MOST_TEXT_BYTES = (1 << 31) - 1  # most bytes of a `pa.string()` array
_NULL = bytes(16)  # replaces the digest of a null
_32, _LOW_32 = np.uint64(32), np.uint64(0xFFFFFFFF)
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """A file mapped into memory without an open descriptor, so that thousands can be mapped.

    `numpy.memmap` holds a descriptor for each map; since Python 3.13 `mmap(trackfd=False)` avoids
    this.
    """

    def __init__(self, file: IO[bytes], num_bytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = _LIBC.mmap(None, num_bytes, protection, mmap.MAP_SHARED, file.fileno(), 0)
        if self._address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._num_bytes, self._unmap = num_bytes, _LIBC.munmap
        self.__array_interface__ = {
            "data": (self._address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        if self._address != _FAILED:
            self._unmap(self._address, self._num_bytes)


def scratch_file() -> IO[bytes]:
    """Open a new file without a name."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=_FOLDER)


def scratch_array(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Return an uninitialised array; a large one is in a file if the system can map one more."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < _SMALLEST_FILE_BYTES:
        return np.empty(shape, dtype)
    with scratch_file() as file:
        file.truncate(num_bytes)
        if hasattr(os, "posix_fallocate"):  # a disk that fills up later would kill the process
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        try:
            return np.asarray(_Mapping(file, num_bytes)).view(dtype).reshape(shape)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            return np.empty(shape, dtype)  # a table of very many columns


def store_table(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Write the batches to a file, and return them as one table that reads from the file."""
    with scratch_file() as file:
        with pa.ipc.new_file(file, schema) as writer:
            for table in _join_batches(batches, schema):
                writer.write_table(table)
        file.flush()
        content = np.asarray(_Mapping(file, file.tell()))
    return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(content))).read_all()


def store_array(array: pa.Array) -> pa.Array:
    """Return a copy of the array in a file if the array is large, else the array itself."""
    if array.nbytes < _SMALLEST_FILE_BYTES:
        return array
    batch = pa.RecordBatch.from_arrays([array], ["values"])
    return store_table([batch], batch.schema)["values"].chunk(0)


def store_bytes(blocks: Iterable[bytes]) -> pa.Buffer:
    """Return the concatenated blocks, in a file if they are large."""
    held, num_bytes, unread = [], 0, iter(blocks)
    for block in unread:
        held.append(block)
        num_bytes += len(block)
        if num_bytes >= _SMALLEST_FILE_BYTES:
            break
    else:
        return pa.py_buffer(b"".join(held))
    with scratch_file() as file:
        file.writelines(held)
        file.writelines(unread)
        file.flush()
        return pa.py_buffer(np.asarray(_Mapping(file, file.tell())))


def distinct_texts(chunks: Sequence[pa.Array]) -> tuple[pa.Array, Rows]:
    """Return the distinct texts in order of appearance, and the index of each row's text.

    The index is -1 for null. Both results are in files, unlike those of `dictionary_encode`. Texts
    are equal if 128 bits of their digests are. Raises OverflowError if the distinct texts have 2
    GiB or more.
    """
    begins = np.cumsum([0, *map(len, chunks)]).tolist()
    digests = scratch_array((begins[-1], 2), np.uint64)
    for chunk, begin in zip(chunks, begins, strict=False):
        cells = chunk.cast(pa.binary()).to_pylist()
        found = b"".join(_NULL if cell is None else _digest(cell) for cell in cells)
        digests[begin : begin + len(chunk)] = np.frombuffer(found, np.uint64).reshape(-1, 2)
    firsts = first_equal_rows(digests)
    numbers = scratch_array((len(firsts) + 1,), np.int64)  # numbers of the distinct texts
    offsets = scratch_array((len(firsts) + 1,), np.int32)
    numbers[-1], offsets[0], count = -1, 0, 0

    def contents() -> Iterator[bytes]:
        nonlocal count
        num_bytes = 0
        for chunk, begin in zip(chunks, begins, strict=False):
            rows = slice(begin, begin + len(chunk))
            firsts[rows][chunk.is_null().to_numpy(zero_copy_only=False)] = -1
            is_first = firsts[rows] == np.arange(rows.start, rows.stop)
            numbers[rows] = count + np.cumsum(is_first) - 1
            new = chunk.cast(pa.binary()).filter(pa.array(is_first)).to_pylist()
            ends = num_bytes + np.cumsum([0, *map(len, new)])[1:]
            num_bytes += sum(map(len, new))
            if num_bytes > _MOST_TEXT_BYTES:
                raise OverflowError("the distinct texts have 2 GiB or more")
            offsets[count + 1 : count + 1 + len(new)] = ends
            count += len(new)
            yield b"".join(new)

    content = store_bytes(contents())
    buffers = [None, pa.py_buffer(offsets[: count + 1]), content]
    return pa.Array.from_buffers(pa.string(), count, buffers), take(numbers, firsts)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=len(_NULL)).digest()


def first_equal_rows(digests: Keys) -> Rows:
    """Return the first row with equal digests for each row of `digests` (N, 2): (N,)."""
    firsts = scratch_array((len(digests),), np.int64)
    order = order_by(digests[:, 0], digests[:, 1])
    for part in key_slices(len(order), lambda part: digests[order[part], 0]):
        rows = order[part]
        own = digests[rows]
        is_new = np.append(True, (own[1:] != own[:-1]).any(axis=1))
        firsts[rows] = rows[np.maximum.accumulate(np.where(is_new, np.arange(len(rows)), 0))]
    return firsts


def _join_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.Table]:
    """Join small batches into larger tables, because every batch needs memory for its metadata."""
    held: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        held.append(batch)
        num_rows += batch.num_rows
        num_bytes += batch.nbytes
        if num_rows >= _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
            yield pa.Table.from_batches(held, schema).combine_chunks()
            held, num_rows, num_bytes = [], 0, 0
    if num_rows:
        yield pa.Table.from_batches(held, schema).combine_chunks()


def take_rows(table: pa.Table, rows: Rows) -> pa.Table:
    """Return `table.take(rows)` without first copying all batches, as Arrow would."""
    batches = table.to_batches()
    ends = np.cumsum([0, *(batch.num_rows for batch in batches)])
    order = np.argsort(rows, kind="stable")
    ascending = rows[order]
    cuts = np.searchsorted(ascending, ends)
    parts = [
        batch.take(pa.array(ascending[begin:end] - first))
        for batch, first, begin, end in zip(batches, ends[:-1], cuts[:-1], cuts[1:], strict=True)
        if begin < end
    ]
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return pa.Table.from_batches(parts, table.schema).combine_chunks().take(pa.array(inverse))


def first_bytes(column: pa.ChunkedArray, num_bytes: int) -> NDArray[np.uint8]:
    """Return the first `num_bytes` bytes of each cell of a fixed-size binary column.

    The result is (N, num_bytes); it is undefined for nulls.
    """
    found = scratch_array((len(column), num_bytes), np.uint8)
    begin = 0
    for chunk in column.chunks:
        values = np.frombuffer(chunk.buffers()[1], np.uint8).reshape(-1, column.type.byte_width)
        end = begin + len(chunk)
        found[begin:end] = values[chunk.offset : chunk.offset + len(chunk), :num_bytes]
        begin = end
    return found


def slices(num_rows: int, size: int = _SLICE_ROWS) -> Iterator[slice]:
    """Cut `num_rows` rows into slices of at most `size`."""
    return (slice(begin, min(begin + size, num_rows)) for begin in range(0, num_rows, size))


def take(values: NDArray[Any], rows: Rows) -> NDArray[Any]:
    """Return `values[rows]` as a scratch array."""
    found = scratch_array((len(rows), *values.shape[1:]), values.dtype.type)
    # With its default mode NumPy would buffer the result in memory. -1 is the last row.
    return np.take(values, rows, axis=0, out=found, mode="wrap")


def true_rows(flags: NDArray[np.bool_]) -> Rows:
    """Return `np.flatnonzero(flags)` as a scratch array."""
    found = scratch_array((int(np.count_nonzero(flags)),), np.int64)
    begin = 0
    for part in slices(len(flags)):
        own = np.flatnonzero(flags[part])
        found[begin : begin + len(own)] = own + part.start
        begin += len(own)
    return found


def each_true(flags: NDArray[np.bool_]) -> Iterator[int]:
    """Yield the numbers of the rows whose flag is True; only one slice is in memory at a time."""
    for part in slices(len(flags)):
        yield from (np.flatnonzero(flags[part]) + part.start).tolist()


def numbers_of(column: pa.ChunkedArray, dtype: type[np.generic]) -> NDArray[Any]:
    """Return a numeric column without nulls as a scratch array of `dtype`."""
    found = scratch_array((len(column),), dtype)
    begin = 0
    for chunk in column.chunks:
        found[begin : begin + len(chunk)] = chunk.to_numpy(zero_copy_only=False)
        begin += len(chunk)
    return found


def order_by(*keys: Keys) -> Rows:
    """Return the row numbers (N,), sorted by several keys of (N,) each; N < 2^32.

    The first key is the most significant; rows with equal keys keep their order.
    """
    packed = scratch_array((len(keys[0]),), np.uint64)  # upper half of the first key, then the row
    for part in slices(len(packed)):
        rows = np.arange(part.start, part.stop, dtype=np.uint64)
        packed[part] = (keys[0][part].astype(np.uint64) & ~_LOW_32) | rows
    packed.sort()
    for part in key_slices(len(packed), lambda part: packed[part] >> _32):
        upper, rows = packed[part] >> _32, packed[part] & _LOW_32
        is_equal = upper[1:] == upper[:-1]
        tied = np.flatnonzero(np.append(is_equal, False) | np.append(False, is_equal))
        among = rows[tied]
        further_keys = [key[among] for key in reversed(keys)]
        rows[tied] = among[np.lexsort([among, *further_keys, upper[tied]])]
        packed[part] = rows
    return packed.view(np.int64)


def pairs_of(codes: Keys) -> Rows:
    """Return pairs of row numbers, (P, 2), from codes with the first one in the upper 32 bits."""
    pairs = scratch_array((len(codes), 2), np.int64)
    for part in slices(len(codes)):
        pairs[part] = np.stack([codes[part] >> _32, codes[part] & _LOW_32], axis=1)
    return pairs


def key_slices(
    num_rows: int, keys_of: Callable[[slice], Keys], size: int = _SLICE_ROWS
) -> Iterator[slice]:
    """Cut sorted rows into slices; rows with the same key are in the same slice."""
    begin = 0
    while begin < num_rows:
        end = min(begin + size, num_rows)
        last = keys_of(slice(end - 1, end))
        while end < num_rows:
            is_same = keys_of(slice(end, min(end + size, num_rows))) == last
            num_same = len(is_same) if is_same.all() else int(np.argmin(is_same))
            end += num_same
            if num_same < len(is_same):
                break
        yield slice(begin, end)
        begin = end


class ScratchTable:
    """A table that grows row by row; when many rows are in memory, they move to a file."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema, self._held = schema, list[tuple[object, ...]]()
        self._file: IO[bytes] | None = None
        self._writer: Any = None  # a `pa.ipc.RecordBatchStreamWriter`

    def add(self, *cells: object) -> None:
        """Add a row with one cell for each column."""
        self._held.append(cells)
        if len(self._held) == _HELD_ROWS:
            self._write()

    def table(self) -> pa.Table:
        """Return all rows in the order in which they were added."""
        if self._file is None:
            return pa.Table.from_batches([self._batch()], self._schema)
        self._write()
        self._file.flush()
        content = np.asarray(_Mapping(self._file, self._file.tell()))
        return pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(content))).read_all()

    def _write(self) -> None:
        if self._file is None:
            self._file = scratch_file()
            weakref.finalize(self, self._file.close)
            self._writer = pa.ipc.new_stream(self._file, self._schema)
        self._writer.write_batch(self._batch())
        self._held = []

    def _batch(self) -> pa.RecordBatch:
        columns = zip(*self._held, strict=True) if self._held else [()] * len(self._schema)
        arrays = [
            pa.array(cells, field.type) for cells, field in zip(columns, self._schema, strict=True)
        ]
        return pa.record_batch(arrays, schema=self._schema)


class ScratchSet:
    """A set of numbers that grows in a new, empty file; several threads may add to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._count, self._lock = file, 0, Lock()

    def add(self, numbers: Keys) -> None:
        """Add numbers. Numbers that are already in the set have no effect."""
        with self._lock:
            self._file.write(np.ascontiguousarray(numbers).data)
            self._count += len(numbers)

    def ascending(self) -> Keys:
        """Return the distinct numbers in ascending order. No number may be added afterwards."""
        self._file.flush()
        if not self._count:
            return np.zeros(0, np.uint64)
        numbers = np.asarray(np.memmap(self._file, np.uint64, "r+", shape=(self._count,)))
        numbers.sort()
        end = 0
        for part in slices(len(numbers)):
            piece = np.unique(numbers[part])
            piece = piece[1:] if end and piece[0] == numbers[end - 1] else piece
            numbers[end : end + len(piece)] = piece
            end += len(piece)
        return numbers[:end]
