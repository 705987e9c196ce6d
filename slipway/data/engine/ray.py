"""Ordered map on a Ray cluster: the one at RAY_ADDRESS, or one that runs here during the map.

Workers receive the items and send the results back; they share neither files nor memory with this
process. They need the same versions of Slipway and its libraries, which every task checks. A task
whose worker died runs again, at most three times. Ray opens its ports to the network and has no
setting against it, so a token of this run protects them.
"""

import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from slipway.data.engine.code_version import pixel_code
from slipway.system.environment import switch_off_telemetry
from slipway.system.errors import UnavailableError

Item = TypeVar("Item")
Result = TypeVar("Result")
_CHUNKS_PER_WORKER = 2
_RETRIES = 3
_CONNECT_TIMEOUT_S = 5.0
_SOCKET_PATH_BYTES = 107  # limit of the operating system
_RAY_PATH_BYTES = 80  # longest path that Ray makes below its folder
_FOLDER = Path(".work/ray")


def map_on_ray(
    function: Callable[[Item], Result], chunks: Iterator[list[Item]], num_workers: int
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order.

    `num_workers` 0 means one per core of the cluster. Raises UnavailableError at once if Ray is not
    installed, and later if the cluster cannot be reached or workers keep dying.
    """
    check_installed()
    return _map(function, chunks, num_workers)


def check_installed() -> None:
    """Raise UnavailableError if Ray is not installed."""
    if find_spec("ray") is None:
        raise UnavailableError(
            "data.engine is ray, but Ray is not installed. "
            "Install the extra (pip install 'slipway-ml[ray]'), or set data.engine to local."
        )


def _map(
    function: Callable[[Item], Result], chunks: Iterator[list[Item]], num_workers: int
) -> Iterator[Result]:
    with _cluster(num_workers) as ray:
        task = ray.remote(max_retries=_RETRIES, num_cpus=1)(_map_chunk)
        shared, code = ray.put(function), pixel_code()
        num_pending = _CHUNKS_PER_WORKER * (
            num_workers or int(ray.cluster_resources().get("CPU", 1))
        )
        pending: deque[Any] = deque()
        try:
            for chunk in chunks:
                pending.append(task.remote(shared, chunk, code))
                if len(pending) >= num_pending:
                    yield from _result(ray, pending.popleft())
            while pending:
                yield from _result(ray, pending.popleft())
        finally:
            for reference in pending:
                ray.cancel(reference)


def _map_chunk(function: Callable[[Item], Result], chunk: list[Item], code: str) -> list[Result]:
    if pixel_code() != code:
        raise UnavailableError(
            "a Ray worker has another version of Slipway, Pillow, simplejpeg or NumPy, and might "
            "decode other pixels. Install the same requirements.lock on every machine of the "
            "cluster."
        )
    return [function(item) for item in chunk]


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # The worker could not even unpickle the function.
        if isinstance(error.cause, (ImportError, ray.exceptions.RayError)):
            reason = str(error.cause).strip().splitlines()[-1]
            raise UnavailableError(
                f"a Ray worker cannot run this: {reason}. Install Slipway and the "
                "requirements.lock of this checkout on every machine of the cluster, and put the "
                "code that precompute.transform names on their import path (PYTHONPATH)."
            ) from error
        # Our function raised it; raise it as if it had run here.
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except ray.exceptions.RayError as error:
        raise UnavailableError(
            f"Ray could not finish a task, though it tried {_RETRIES + 1} times: {error}. "
            "Most likely workers lack memory. Use fewer workers, or set data.engine to local."
        ) from error


@contextlib.contextmanager
def _cluster(num_workers: int) -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster; stop the cluster if it was started here."""
    switch_off_telemetry()
    address = os.environ.get("RAY_ADDRESS")
    if address is None:  # Ray would write a token of its own into the home folder
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    if ray.is_initialized():
        yield ray
        return
    with contextlib.ExitStack() as stack:
        try:
            if address is not None:
                _check_reachable(address)
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
            else:
                ray.init(
                    address="local",
                    num_cpus=num_workers or None,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(stack.enter_context(_folder())),
                )
        except (OSError, RuntimeError, ValueError) as error:
            problem = (
                f"the Ray cluster at {address} (RAY_ADDRESS) cannot be reached"
                if address
                else "no Ray cluster can be started on this machine"
            )
            raise UnavailableError(
                f"{problem}: {error}. Fix that, or set data.engine to local."
            ) from error
        stack.callback(ray.shutdown)
        yield ray


def _check_reachable(address: str) -> None:
    """Raise OSError if nothing listens at the address. Ray would retry for minutes."""
    url = urlsplit(address if "://" in address else f"//{address}")
    if url.hostname and url.port:
        socket.create_connection((url.hostname, url.port), _CONNECT_TIMEOUT_S).close()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Create a folder for Ray's logs and sockets, with a short path because sockets require it."""
    folder = _FOLDER.absolute()
    if len(os.fsencode(folder)) + _RAY_PATH_BYTES > _SOCKET_PATH_BYTES:
        folder = Path(tempfile.mkdtemp(prefix="slipway-ray-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
