"""Request ids: the caller's own if valid, otherwise a random one."""

import os
import re

import pytest

from slipway.serving.http.routes import new_request_id, request_id_of


@pytest.mark.parametrize("given", [b"a", b"9b2f6c1d8e7a4053", b"A.b_c-1", b"x" * 64])
def test_a_valid_request_id_of_the_caller_is_used(given: bytes) -> None:
    assert request_id_of({b"x-request-id": given}) == given.decode()


@pytest.mark.parametrize(
    "given", [b"", b"a b", b"a\r\nb", b"a\n", b"x" * 65, "\u00e4".encode(), b"../x"]
)
def test_an_invalid_request_id_is_replaced(given: bytes) -> None:
    assert re.fullmatch("[0-9a-f]{16}", request_id_of({b"x-request-id": given}))


def test_request_ids_are_unique() -> None:
    assert len({new_request_id() for _ in range(5000)}) == 5000


def test_forked_process_creates_other_request_ids_than_its_parent() -> None:
    new_request_id()  # so that some are at hand, which the child would have, too
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, " ".join(new_request_id() for _ in range(300)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        its = set(pipe.read().split())
    os.waitpid(child, 0)
    assert len(its) == 300
    assert not its & {new_request_id() for _ in range(600)}
