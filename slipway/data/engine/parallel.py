"""Ordered map over the processes of this machine or of a Ray cluster.

The result is the same for any number of workers. Only a few chunks are in flight at a time, so
memory does not grow with the length of the stream. A worker exits with its parent, even if the
parent is killed.
"""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Literal, TypeVar

from slipway.data.engine.ray import map_on_ray
from slipway.system.cores import num_cores
from slipway.system.errors import UnavailableError
from slipway.system.malloc import keep_freed_pages

Engine = Literal["local", "ray"]
Item = TypeVar("Item")
Result = TypeVar("Result")
_CHUNK_ITEMS = 256
_CHUNK_BYTES = 4 << 20
_CHUNKS_PER_WORKER = 2
# A fork would copy locks that Arrow's threads hold.
_SPAWN = multiprocessing.get_context("spawn")


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_workers: int,
    item_bytes: Callable[[Item], int],
    engine: Engine = "local",
    *,
    chunk_items: int | None = None,
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order.

    Items and results travel in chunks. If there is only one chunk, this process computes it. The
    engine "ray" runs everything on the cluster. `function`, items and results must be picklable.

    Args:
        function: runs in the workers.
        items: any iterable; read only as fast as the workers need it.
        num_workers: 0 for one per core; 1 runs in this process.
        item_bytes: size of an item, which limits how many go into one chunk.
        engine: local processes or Ray.
        chunk_items: largest number of items in a chunk.
    """
    chunks = chunked(items, item_bytes, chunk_items or _CHUNK_ITEMS, _CHUNK_BYTES)
    if engine == "ray":
        return map_on_ray(function, chunks, num_workers)
    head = list(itertools.islice(chunks, 2))
    if num_workers == 1 or len(head) < 2:
        return (function(item) for chunk in itertools.chain(head, chunks) for item in chunk)
    return _map_in_processes(function, itertools.chain(head, chunks), num_workers or num_cores())


def _map_in_processes(
    function: Callable[[Item], Result], chunks: Iterator[list[Item]], num_workers: int
) -> Iterator[Result]:
    pool = ProcessPoolExecutor(num_workers, mp_context=_SPAWN, initializer=_start_worker)
    try:
        pending: deque[Future[list[Result]]] = deque()
        for chunk in chunks:
            pending.append(pool.submit(_map_chunk, function, chunk))
            if len(pending) >= num_workers * _CHUNKS_PER_WORKER:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise UnavailableError(
            f"one of {num_workers} worker processes was killed, most likely for lack of memory. "
            "Use fewer workers, or free memory."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _map_chunk(function: Callable[[Item], Result], chunk: list[Item]) -> list[Result]:
    return [function(item) for item in chunk]


def chunked(
    items: Iterable[Item], item_bytes: Callable[[Item], int], max_items: int, max_bytes: int
) -> Iterator[list[Item]]:
    """Collect items in lists; a list is complete when it reaches `max_items` or `max_bytes`."""
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += item_bytes(item)
        if len(chunk) >= max_items or size >= max_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _start_worker() -> None:
    keep_freed_pages()
    # Ctrl-C reaches the whole process group; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent.sentinel,), daemon=True).start()


def _exit_with(parent: int) -> None:
    """Exit as soon as the process `parent` has ended, even if it was killed."""
    wait([parent])
    os._exit(1)
