"""Requests with ambiguous framing are refused, so that none can hide in another's body."""

from collections.abc import Iterator
from typing import Any

import pytest

from slipway.serving.http.framing import MAX_HEAD_BYTES, MAX_HEADERS, MAX_URL_BYTES, checked_headers
from slipway.serving.http.responses import Refusal
from tests.serving.http.test_hostile_clients import answers, error_in
from tests.serving.ready_service import ready_service
from tests.serving.server import Server

Headers = list[tuple[bytes, bytes]]


def checked(headers: Headers, version: str = "1.1", path: bytes = b"/predict") -> Any:
    """Check the head of a request. Returns its headers."""
    return checked_headers(
        {"headers": headers, "http_version": version, "raw_path": path, "query_string": b""}
    )


LENGTH, CHUNKED, HOST = (
    (b"content-length", b"3"),
    (b"transfer-encoding", b"chunked"),
    (b"host", b"localhost"),
)


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        ([], "1.1"),
        ([], "1.0"),
        ([HOST, LENGTH], "1.1"),
        ([HOST, CHUNKED], "1.1"),
        ([(b"transfer-encoding", b" Chunked ")], "1.1"),
        ([LENGTH], "1.0"),
        ([LENGTH, (b"expect", b"100-Continue")], "1.1"),
        ([(b"accept", b"*/*"), (b"accept", b"image/*")], "1.1"),
    ],
)
def test_requests_with_unambiguous_framing_are_accepted(headers: Headers, version: str) -> None:
    assert checked(headers, version) == dict(headers)


@pytest.mark.parametrize(
    ("headers", "version", "found"),
    [
        ([LENGTH, LENGTH], "1.1", "content-length"),
        ([CHUNKED, CHUNKED], "1.1", "transfer-encoding"),
        ([LENGTH, CHUNKED], "1.1", "one content-length"),
        ([CHUNKED], "1.0", "transfer-encoding"),
        ([(b"transfer-encoding", b"gzip, chunked")], "1.1", "transfer-encoding"),
        ([(b"transfer-encoding", b"identity")], "1.1", "transfer-encoding"),
        ([(b"transfer-encoding", b"xchunked")], "1.1", "transfer-encoding"),
        ([(b"content-length", b"+3")], "1.1", "not a number"),
        ([(b"content-length", b"3, 3")], "1.1", "not a number"),
        ([(b"content-length", "٣".encode())], "1.1", "not a number"),
        ([HOST, HOST], "1.1", "host"),
        (
            [(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")],
            "1.1",
            "authorization",
        ),
        ([], "2.0", "HTTP/2.0"),
        ([], "0.9", "HTTP/0.9"),
    ],
)
def test_requests_with_ambiguous_framing_are_refused(
    headers: Headers, version: str, found: str
) -> None:
    with pytest.raises(Refusal, match=found) as refusal:
        checked(headers, version)
    assert refusal.value.code == "malformed_request"


@pytest.mark.parametrize(
    "host", [b"a:x@evil", b"a b", b"a/b", b"[::1]b", b"a:1:2", b"[a-z]", b"\xe4"]
)
def test_host_header_that_is_not_a_name_or_address_is_refused(host: bytes) -> None:
    with pytest.raises(Refusal, match="Host"):
        checked([(b"host", host)])


@pytest.mark.parametrize(
    "host", [b"", b"a_b.example:", b"xn--4ca.example", b"[::1]:3000", b"10.0.0.1"]
)
def test_a_host_with_any_valid_name_or_address_is_accepted(host: bytes) -> None:
    assert checked([(b"host", host)]) == {b"host": host}


def test_an_upgrade_request_with_a_body_is_refused_and_one_without_is_not() -> None:
    upgrade, connection = (b"upgrade", b"h2c"), (b"connection", b"keep-alive, Upgrade")
    checked([HOST, upgrade, connection])
    checked([HOST, LENGTH, upgrade])
    with pytest.raises(Refusal, match="Upgrade"):
        checked([HOST, LENGTH, upgrade, connection])


@pytest.mark.parametrize(("value", "version"), [(b"200-ok", "1.1"), (b"100-continue", "1.0")])
def test_an_unsupported_expectation_is_refused(value: bytes, version: str) -> None:
    with pytest.raises(Refusal) as refusal:
        checked([(b"expect", value)], version)
    assert (refusal.value.code, refusal.value.field) == ("expectation_failed", "expect")


def test_heads_are_accepted_up_to_their_limits() -> None:
    pad = (b"x", b"p" * (MAX_HEAD_BYTES - len(b"/predict") - 1))
    checked([(b"x%d" % number, b"") for number in range(MAX_HEADERS)])
    checked([], path=b"/" * MAX_URL_BYTES)
    checked([pad])
    for headers, path, code in [
        ([(b"x%d" % number, b"") for number in range(MAX_HEADERS + 1)], b"/", "headers_too_large"),
        ([], b"/" * (MAX_URL_BYTES + 1), "url_too_long"),
        ([pad], b"/predict/", "headers_too_large"),
    ]:
        with pytest.raises(Refusal) as refusal:
            checked(headers, path=path)
        assert refusal.value.code == code


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready_service(
        tmp_path_factory.mktemp("framing"), request_timeout_s=0.5, idle_timeout_s=1
    ) as server:
        yield server


HIDDEN = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
SMUGGLED = [
    POST + b"content-length: 0\r\ncontent-length: 40\r\n\r\n" + HIDDEN,
    POST + b"content-length: 0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding: identity, chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    POST + b"x: y\r\n transfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    POST + b"x: y\rtransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    POST + b"content-length: +0\r\n\r\n" + HIDDEN,
    POST + b"content-length: 0x10\r\n\r\n" + HIDDEN,
    POST + b"content-length: 0, 0\r\n\r\n" + HIDDEN,
    POST + b"content-length: 99999999999999999999\r\n\r\n" + HIDDEN,
    POST + b"host: elsewhere\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding: chunked\r\n\r\n0x1\r\nx\r\n0\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding: chunked\r\n\r\n-1\r\nx\r\n0\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding: chunked\r\n\r\n1\r\nxy\r\n0\r\n\r\n" + HIDDEN,
    POST + b"transfer-encoding: chunked\r\n\r\n1\nx\n0\n\n" + HIDDEN,
    POST + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\nx\r\n0\r\n\r\n" + HIDDEN,
    b"POST /predict HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    b"GET /livez HTTP/2.0\r\nhost: localhost\r\n\r\n" + HIDDEN,
    b"GET /livez\r\n\r\n" + HIDDEN,
]


@pytest.mark.process
@pytest.mark.parametrize("payload", SMUGGLED)
def test_no_second_request_can_be_hidden_in_the_body_of_the_first(
    server: Server, payload: bytes
) -> None:
    received = answers(server, payload)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"alive" not in received


@pytest.mark.process
def test_second_request_after_a_complete_first_one_is_served(server: Server) -> None:
    """Control: the hidden request above would be answered if it were accepted."""
    received = answers(server, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n" + HIDDEN)
    assert received.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.process
def test_expect_100_continue_is_confirmed_or_refused_before_the_body(
    server: Server,
) -> None:
    asked = answers(server, POST + b"expect: 100-continue\r\ncontent-length: 4\r\n\r\n", b"text")
    assert asked.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 422 ")
    refused = answers(
        server, POST + b"expect: 100-continue\r\ncontent-length: 999999999\r\n\r\n" + HIDDEN
    )
    assert error_in(refused)["code"] == "body_too_large"
    assert b"\r\nconnection: close\r\n" in refused.partition(b"\r\n\r\n")[0] + b"\r\n"
    assert b"100 Continue" not in refused
