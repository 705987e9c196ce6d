"""Thousands of hostile requests to the real process: each gets one well-formed response."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from slipway.serving.http.responses import ERRORS
from slipway.serving.load_test.load import REFUSED, Answer, ask_each, by_status, http_request
from tests.serving.bundles import picture, row_classifier, table_row
from tests.serving.generated import Case, finite, image_case, is_right, table_case
from tests.serving.ready_service import ready_service
from tests.serving.server import Server

pytestmark = pytest.mark.process
# These are about the request, not about one field of it.
WITHOUT_A_FIELD = {
    "malformed_request", "malformed_body", "malformed_json", "not_found", "method_not_allowed",
    "body_too_large", "too_many_rows", "not_a_row", "headers_too_large", "url_too_long",
    "too_many_items",
}  # fmt: skip
MAX_BODY_BYTES, MAX_ROWS = 200_000, 1000


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready_service(
        tmp_path_factory.mktemp("images"), max_body_bytes=MAX_BODY_BYTES, max_rows=MAX_ROWS
    ) as server:
        yield server


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready_service(
        tmp_path_factory.mktemp("table"),
        row_classifier(),
        workers=2,
        max_body_bytes=MAX_BODY_BYTES,
        max_rows=MAX_ROWS,
    ) as server:
        yield server


def check(case: Case, answer: Answer) -> None:
    """Check properties that every response has."""
    if case.right is not None:
        assert answer.status == 200
        assert is_right(case, answer.content)
    elif case.request.startswith(b"HEAD "):
        assert answer.status in (200, *range(400, 500))
    elif 400 <= answer.status < 500:
        check_error(answer)
    else:
        assert answer.status == 200  # what was changed may still be an image or a row
        if answer.headers[b"content-type"] == b"application/json":
            assert finite(answer.content)


def check_error(answer: Answer) -> None:
    assert answer.headers[b"content-type"] == b"application/json"
    assert list(answer.content) == ["error"]
    error = answer.content["error"]
    assert list(error) == ["code", "message", "field", "request_id"]
    assert ERRORS[error["code"]] == answer.status
    assert len(error["message"]) > 20
    assert answer.headers[b"x-request-id"].decode() == error["request_id"]
    assert error["field"] is not None or error["code"] in WITHOUT_A_FIELD


def json_request(text: str) -> bytes:
    return http_request(body=text.encode(), content_type="application/json")


def fire(
    server: Server, make: Callable[[int], Case], num_requests: int, first: int
) -> Counter[str]:
    """Send cases over 16 connections. Returns the number of cases by kind and status."""
    processes = server.workers()
    cases = [make(first + number) for number in range(num_requests)]
    answers = ask_each(server.url, [case.request for case in cases], 16)
    assert len(answers) == num_requests
    for answer in answers:
        case = cases[answer.number]
        try:
            check(case, answer)
        except AssertionError as error:
            shown = (
                f"{case.kind}, seed {first + answer.number}: {case.request[:600]!r}\n"
                f"-> {answer.status} {answer.body[:600]!r}"
            )
            raise AssertionError(shown) from error
    assert server.workers() == processes
    assert not re.search("Traceback|Exception|ERROR", server.log.read_text())
    return Counter(f"{cases[answer.number].kind} {answer.status}" for answer in answers)


def test_generated_requests_cover_every_kind_and_most_are_refused(
    images: Server, table: Server
) -> None:
    """Proves that the generated requests have the intended faults."""
    for server, make in ((images, image_case), (table, table_case)):
        outcomes = fire(server, make, 400, first=10**6)
        kinds = {outcome.rpartition(" ")[0] for outcome in outcomes}
        assert len(kinds) >= 6
        refused = sum(
            count for outcome, count in outcomes.items() if int(outcome.rpartition(" ")[2]) >= 400
        )
        assert 0.3 < refused / 400 < 0.9
        assert len({outcome.rpartition(" ")[2] for outcome in outcomes}) >= 6


@pytest.mark.parametrize("num_requests", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_generated_requests_to_a_model_of_images_get_no_5xx_and_no_reset(
    images: Server, num_requests: int
) -> None:
    fire(images, image_case, num_requests, first=0)
    answers = ask_each(images.url, [http_request(body=picture(number)) for number in range(50)])
    assert by_status(answers) == {200: 50}


@pytest.mark.parametrize("num_requests", [500, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_generated_requests_to_a_model_of_rows_get_no_5xx_and_no_reset(
    table: Server, num_requests: int
) -> None:
    fire(table, table_case, num_requests, first=0)
    answers = ask_each(
        table.url, [json_request(json.dumps(table_row(number))) for number in range(50)]
    )
    assert by_status(answers) == {200: 50}


NO_NUMBERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 400,
    "-" + "9" * 310,
    "1e309",
]


@pytest.mark.parametrize("number", NO_NUMBERS)
def test_each_worker_refuses_nan_and_never_returns_it(table: Server, number: str) -> None:
    for text in (
        '{"age": %s}',
        '{"rows": [{"age": 41}, {"age": %s}]}',
        '{"age": {"x": [%s]}}',
        "%s",
        "[%s]",
    ):
        for answer in ask_each(table.url, [json_request(text.replace("%s", number))] * 16):
            assert answer.content["error"]["code"] == "malformed_json"
            assert number[:10] in answer.content["error"]["message"]


def test_error_names_a_repeated_key_and_an_out_of_range_number(table: Server) -> None:
    row = json.dumps(table_row(1))
    too_large = row.replace('"age": 1,', '"age": 1e300,')
    for body, code, field in [
        (row[:-1] + ', "age": 1}', "malformed_json", None),
        (row.replace('"age": 1,', '"age": 123456789012345678901234567890,'), "out_of_range", "age"),
        (f'{{"rows": [{row}, {too_large}]}}', "out_of_range", "rows[1].age"),
    ]:
        for answer in ask_each(table.url, [json_request(body)] * 8):
            assert (answer.content["error"]["code"], answer.content["error"]["field"]) == (
                code,
                field,
            )
            assert "age" in answer.content["error"]["message"]


def test_numbers_in_form_fields_are_refused(images: Server) -> None:
    bodies = [
        b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n%s\r\n--b--\r\n'
        % number.encode()
        for number in NO_NUMBERS
    ]
    for answer in ask_each(
        images.url,
        [
            http_request(body=body, content_type="multipart/form-data; boundary=b")
            for body in bodies
        ],
    ):
        assert (answer.content["error"]["code"], answer.content["error"]["field"]) == (
            "not_a_file",
            "image",
        )


@pytest.mark.parametrize("num_rounds", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_one_bad_image_among_32_requests_gets_4xx_and_the_others_get_predictions(
    images: Server, num_rounds: int
) -> None:
    cases = [image_case(seed) for seed in range(3000)]
    right = [case for case in cases if case.kind == "right image"][:200]
    bad = [case for case in cases if case.kind == "changed image"]
    seen: Counter[int] = Counter()
    for number in range(num_rounds):
        crowd = [right[(number * 31 + place) % len(right)] for place in range(31)]
        crowd.insert(number % 32, bad[number % len(bad)])
        answers = ask_each(images.url, [case.request for case in crowd], 32)
        assert len(answers) == 32
        for answer in answers:
            check(crowd[answer.number], answer)
        seen.update(answer.status for answer in answers)
    assert seen[REFUSED] == 0
    assert seen[422] > num_rounds / 2


def test_checks_of_responses_detect_each_kind_of_wrong_response() -> None:
    """Proves that each check of an answer can fail."""
    case = next(case for case in map(image_case, range(100)) if case.kind == "right image")
    wrong = {"probabilities": {"dark": 0.1, "grey": 0.2, "bright": 0.7}}
    assert not is_right(case, wrong)
    for status, body in [
        (500, b"{}"),
        (200, b'{"value": NaN}'),
        (422, b'{"error": "no"}'),
        (REFUSED, b""),
    ]:
        with pytest.raises((AssertionError, ValueError, KeyError)):
            check(
                Case("changed image", b"POST"),
                Answer(0, 0.0, 0.0, status, {b"content-type": b"application/json"}, body),
            )
