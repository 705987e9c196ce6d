"""The metrics of a real service equal the counts of its callers, over all workers."""

import asyncio
import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from slipway.serving.load_test.load import Answer, Callers, ask_each, by_status, http_request, run
from tests import plain_http
from tests.serving.bundles import certify, picture, slow_classifier, write_bundle
from tests.serving.generated import image_case
from tests.serving.server import Server, running

pytestmark = pytest.mark.process
GOOD = http_request(body=picture())
SHOWN_S = 0.5  # a worker writes its counts twenty times a second


def counters(server: Server, name: str, label: str) -> Counter[str]:
    """Return the nonzero values of a counter by one of its labels."""
    time.sleep(SHOWN_S)
    found: Counter[str] = Counter()
    for labels, value in re.findall(
        rf"^{name}_total\{{([^}}]*)\}} (\S+)$",
        plain_http.get(server.url + "/metrics").text,
        re.MULTILINE,
    ):
        found[dict(re.findall(r'(\w+)="([^"]*)"', labels))[label]] += int(float(value))
    return +found


def codes(answers: list[Answer]) -> Counter[str]:
    return Counter(str(answer.status) for answer in answers)


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_counters_over_all_workers_equal_the_counts_of_callers(
    tmp_path: Path, num_workers: int
) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle"))
    with running(tmp_path, workers=num_workers, max_body_bytes=200_000) as server:
        server.wait()
        before = {
            name: counters(server, name, label)
            for name, label in (("slipway_requests", "code"), ("slipway_errors", "error"))
        }
        own_scrapes = 2
        requests = [image_case(seed).request for seed in range(1500)] + [GOOD] * 500
        requests = [request for request in requests if not request.startswith(b"HEAD ")]
        answers = ask_each(server.url, requests, 16)
        seen = codes(answers)
        predictions = [
            answer
            for answer in answers
            if answer.status == 200 and requests[answer.number].startswith(b"POST /predict")
        ]
        versions = {answer.content["model_version"] for answer in predictions}
        counted = counters(server, "slipway_requests", "code") - before["slipway_requests"]
        assert counted == seen + Counter({"200": own_scrapes})
        errors = Counter(
            answer.content["error"]["code"] for answer in answers if answer.status >= 400
        )
        assert counters(server, "slipway_errors", "error") - before["slipway_errors"] == errors
        assert counters(server, "slipway_predictions", "slot") == {"stable": len(predictions)}
        info = re.findall(
            r'slipway_model_info\{[^}]*model_version="([^"]+)"[^}]*\} 1\.0',
            plain_http.get(server.url + "/metrics").text,
        )
        assert set(info) == versions
        assert json.loads(plain_http.get(server.url + "/model").text)["model_version"] in versions


def test_requests_that_expire_in_the_queue_never_reach_the_model_and_are_counted(
    tmp_path: Path,
) -> None:
    certify(tmp_path / "certificate.json", write_bundle(tmp_path / "bundle", slow_classifier(64)))
    num_requests = 480  # 9 seconds of work on an idle core
    with running(
        tmp_path,
        num_threads=1,
        max_batch_size=4,
        request_timeout_s=1.5,
        max_wait_s=60,
        max_queue=1000,
    ) as server:
        server.wait()

        async def main() -> list[Answer]:
            callers = Callers(server.url)
            answers = await asyncio.gather(
                *(callers.ask(number, GOOD) for number in range(num_requests))
            )
            callers.close()
            return answers

        answers = run(main())
        seen = by_status(answers)
        assert set(seen) == {200, 504}
        assert {answer.content["error"]["code"] for answer in answers if answer.status == 504} == {
            "deadline_exceeded"
        }
        time.sleep(1)
        text = plain_http.get(server.url + "/metrics").text
        rows, expired = (
            _value(name, text) for name in ("slipway_batch_size_sum", "slipway_expired_total")
        )
        assert rows + expired == num_requests
        assert seen[200] <= rows < num_requests * 0.75  # some expired while the model had them
        assert expired > num_requests / 10


def _value(name: str, text: str) -> float:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found
    return float(found.group(1))
