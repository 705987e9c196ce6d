"""An ordered map over processes of this machine or of a Ray cluster: bounded memory, the same result for any number of workers.

Only a few chunks are on their way at a time, so a stream of any length can go through. A worker ends with
its parent, even when that is killed.
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
from slipway.system.malloc import keep_freed_memory

Engine = Literal["local", "ray"]
Item = TypeVar("Item")
Result = TypeVar("Result")
_CHUNK_ITEMS = 256
_CHUNK_BYTES = 4 << 20
_CHUNKS_PER_WORKER = 2


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_workers: int,
    item_bytes: Callable[[Item], int],
    engine: Engine = "local",
    *,
    chunk_items: int | None = None,
) -> Iterator[Result]:
    """`function` of each item, in order. `num_workers` 0 means one per core, and 1 runs in this very process.

    Work goes out and comes back in chunks of at most `chunk_items`. What fits into one is not worth a process and runs here too;
    with the engine "ray" everything runs on the cluster. `function`, items and results must be picklable.
    """
    chunks = _chunks(items, item_bytes, chunk_items or _CHUNK_ITEMS)
    if engine == "ray":
        return map_on_ray(function, chunks, num_workers)
    head = list(itertools.islice(chunks, 2))
    if num_workers == 1 or len(head) < 2:
        return (function(item) for chunk in itertools.chain(head, chunks) for item in chunk)
    return _map_in_processes(function, itertools.chain(head, chunks), num_workers or num_cores())


def _map_in_processes(
    function: Callable[[Item], Result], chunks: Iterator[list[Item]], num_workers: int
) -> Iterator[Result]:
    context = multiprocessing.get_context(
        "spawn"
    )  # a fork would copy locks that Arrow's threads hold
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_begin)
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
            f"one of {num_workers} worker processes was killed, most likely for lack of memory. Use fewer workers, or free memory."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _map_chunk(function: Callable[[Item], Result], chunk: list[Item]) -> list[Result]:
    return [function(item) for item in chunk]


def _chunks(
    items: Iterable[Item], item_bytes: Callable[[Item], int], chunk_items: int
) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += item_bytes(item)
        if len(chunk) >= chunk_items or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _begin() -> None:
    keep_freed_memory()
    _end_with_parent()


def _end_with_parent() -> None:
    """Exit as soon as the parent process is gone, even if it was killed."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group: the parent alone answers it
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent.sentinel,), daemon=True).start()


def _leave_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
