"""The ordered map on a Ray cluster: RAY_ADDRESS names one, or else one is started on this machine and ended afterwards.

Workers get the items themselves and send the results back: they share neither files nor memory with this process. They must
have the same version of Slipway and its libraries installed, which every task checks. A task whose worker died is run again,
at most three times. Ray's ports are open to the network, which it gives no way to change: a token of this run guards them.
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
from slipway.system.errors import UnavailableError
from slipway.system.telemetry import switch_off_telemetry

Item = TypeVar("Item")
Result = TypeVar("Result")
_CHUNKS_PER_WORKER = 2
_RETRIES = 3
_CONNECT_TIMEOUT_S = 5.0
_SOCKET_PATH_BYTES = 107  # the system's limit; Ray's own part below its folder has up to 80
_FOLDER = Path(".work/ray")


def map_on_ray(
    function: Callable[[Item], Result], chunks: Iterator[list[Item]], num_workers: int
) -> Iterator[Result]:
    """`function` of each item, in order; `num_workers` 0 means one per core of the cluster.

    UnavailableError at once if Ray is not installed, later if the cluster is not there or workers die again and again.
    """
    check_installed()
    return _map(function, chunks, num_workers)


def check_installed() -> None:
    """UnavailableError if Ray is not installed."""
    if find_spec("ray") is None:
        raise UnavailableError(
            "data.engine is ray, but Ray is not installed. Install the extra (pip install 'slipway[cluster]'), or set data.engine to local."
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
            "a Ray worker has another version of Slipway, Pillow, simplejpeg or NumPy, and might make other pixels. "
            "Install the same requirements.lock on every machine of the cluster."
        )
    return [function(item) for item in chunk]


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(
            error.cause, (ImportError, ray.exceptions.RayError)
        ):  # the function could not even be read
            reason = str(error.cause).strip().splitlines()[-1]
            raise UnavailableError(
                f"a Ray worker cannot run this: {reason}. Install Slipway and the requirements.lock of this checkout on every machine "
                "of the cluster, and put the code that precompute.transform names on their import path (PYTHONPATH)."
            ) from error
        # Raised by our function: as if it had run here.
        raise error.cause if isinstance(error.cause, Exception) else error from None
    except ray.exceptions.RayError as error:
        raise UnavailableError(
            f"Ray could not finish a task, though it tried {_RETRIES + 1} times: {error}. Most likely workers lack memory. "
            "Use fewer workers, or set data.engine to local."
        ) from error


@contextlib.contextmanager
def _cluster(num_workers: int) -> Iterator[Any]:
    """Connect to a Ray cluster and yield the module `ray`; a cluster started here is stopped."""
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
                _check_is_there(address)
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
            else:
                _start(ray, num_workers, stack.enter_context(_folder()))
        except (OSError, RuntimeError, ValueError) as error:
            where = (
                f"the Ray cluster at {address} (RAY_ADDRESS)"
                if address
                else "a Ray cluster on this machine"
            )
            raise UnavailableError(
                f"{where} cannot be reached or started: {error}. Mend that, or set data.engine to local."
            ) from error
        stack.callback(ray.shutdown)
        yield ray


def _check_is_there(address: str) -> None:
    """OSError if nothing listens at the address, because Ray would retry for minutes."""
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.hostname and place.port:
        socket.create_connection((place.hostname, place.port), _CONNECT_TIMEOUT_S).close()


def _start(ray: Any, num_workers: int, folder: Path) -> None:
    ray.init(
        address="local",
        num_cpus=num_workers or None,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder),
    )


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Create a folder for Ray's logs and sockets, whose paths have a length limit."""
    folder = _FOLDER.absolute()
    if len(os.fsencode(folder)) + 80 > _SOCKET_PATH_BYTES:
        folder = Path(tempfile.mkdtemp(prefix="slipway-ray-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
