"""Tables in files without a name: written batch by batch, and read as if they lay in memory.

A file goes with the process, however that ends. The system may take the mapped pages back at any time.
"""

import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_FOLDER = Path(".work/clean")
_BATCH_ROWS = 1 << 14
_BATCH_BYTES = (
    1 << 26
)  # far below 2^31, beyond which Arrow would not join a column of text into one piece
_SMALLEST_FILE_BYTES = 1 << 20
_SYSTEM = ctypes.CDLL(None, use_errno=True)
_SYSTEM.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_SYSTEM.mmap.restype = ctypes.c_void_p
_SYSTEM.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """The pages of a file, which may be closed: NumPy takes them as bytes, and keeps this as long as it needs them.

    Python's own `mmap` would hold the descriptor of the file. A process may have few of these, and a wide
    table has several maps for each column.
    """

    def __init__(self, file: IO[bytes], num_bytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = _SYSTEM.mmap(None, num_bytes, protection, mmap.MAP_SHARED, file.fileno(), 0)
        if self._address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._num_bytes, self._unmap = num_bytes, _SYSTEM.munmap
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
    """A new file without a name."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=_FOLDER)


def scratch_array(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """An array to fill; a large one lies in a file."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < _SMALLEST_FILE_BYTES:
        return np.empty(shape, dtype)
    with scratch_file() as file:
        file.truncate(num_bytes)
        if hasattr(
            os, "posix_fallocate"
        ):  # or a full disk would end the process when the array is filled
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        return np.asarray(_Mapping(file, num_bytes)).view(dtype).reshape(shape)


def stored(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """The batches, in order, as a table in a file."""
    with scratch_file() as file:
        with pa.ipc.new_file(file, schema) as writer:
            for batch in _large(batches, schema):
                writer.write_batch(batch)
        file.flush()
        content = np.asarray(_Mapping(file, file.tell()))
    return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(content))).read_all()


def stored_array(array: pa.Array) -> pa.Array:
    """The same array; a large one lies in a file."""
    if array.nbytes < _SMALLEST_FILE_BYTES:
        return array
    batch = pa.RecordBatch.from_arrays([array], ["values"])
    return stored([batch], batch.schema)["values"].chunk(0)


def _large(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The same rows in few batches, since each batch costs memory for its own description."""
    held: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        held.append(batch)
        num_rows += batch.num_rows
        num_bytes += batch.nbytes
        if num_rows >= _BATCH_ROWS or num_bytes >= _BATCH_BYTES:
            yield from _joined(held, schema)
            held, num_rows, num_bytes = [], 0, 0
    if num_rows:
        yield from _joined(held, schema)


def _joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> list[pa.RecordBatch]:
    joined: list[pa.RecordBatch] = (
        pa.Table.from_batches(batches, schema).combine_chunks().to_batches()
    )
    return joined


def gathered(table: pa.Table, rows: NDArray[np.int64]) -> pa.Table:
    """Some rows of a table of many batches, in the order of `rows`. (Arrow's own `take` would first copy all batches into one.)"""
    batches = table.to_batches()
    ends = np.cumsum([0, *(batch.num_rows for batch in batches)])
    order = np.argsort(rows, kind="stable")
    rising = rows[order]
    cuts = np.searchsorted(rising, ends)
    parts = [
        batch.take(pa.array(rising[begin:end] - first))
        for batch, first, begin, end in zip(batches, ends[:-1], cuts[:-1], cuts[1:], strict=True)
        if begin < end
    ]
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return pa.Table.from_batches(parts, table.schema).combine_chunks().take(pa.array(back))


def first_bytes(column: pa.ChunkedArray, num_bytes: int) -> NDArray[np.uint8]:
    """(N, num_bytes) of a column of at least as many bytes in each row; without meaning where the row is null."""
    width = column.type.byte_width

    def values(chunk: pa.Array) -> NDArray[np.uint8]:
        every = np.frombuffer(chunk.buffers()[1], np.uint8).reshape(-1, width)
        return every[chunk.offset : chunk.offset + len(chunk), :num_bytes]

    return _filled(scratch_array((len(column), num_bytes), np.uint8), map(values, column.chunks))


def numbers(column: pa.ChunkedArray) -> NDArray[Any]:
    """(N,) of a column of numbers, in their own type, 0 where it is null."""
    found = scratch_array((len(column),), column.type.to_pandas_dtype())
    return _filled(found, (pc.fill_null(chunk, 0).to_numpy() for chunk in column.chunks))


def is_present(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """(N,) where a column is not null."""
    return _filled(
        scratch_array((len(column),), np.bool_),
        (np.asarray(pc.is_valid(chunk)) for chunk in column.chunks),
    )


def _filled(array: NDArray[Any], pieces: Iterable[NDArray[Any]]) -> NDArray[Any]:
    begin = 0
    for piece in pieces:
        array[begin : begin + len(piece)] = piece
        begin += len(piece)
    return array
