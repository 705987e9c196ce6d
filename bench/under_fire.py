"""Sends the same malformed requests to the service and to an ordinary BentoML API.

`python -m bench.under_fire` sends generated requests (tests/serving/generated.py) and unknown paths
to each. It prints and writes one table: answers, broken connections, invalid JSON, memory. All
but the memory are counts, which do not depend on the machine's load.
"""

import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.conditions import conditions
from bench.serving_overhead import started
from slipway.serving.load_test.load import REFUSED, Answer, ask_each, by_status, http_request
from slipway.system import files
from tests.serving.bundles import certify, picture, write_bundle
from tests.serving.generated import image_case, is_right

NUM_REQUESTS = 10_000
NUM_UNKNOWN = 10_000
RESULT = Path("bench/results/under_fire.md")
PART = (
    b'--b\r\nContent-Disposition: form-data; name="image"; filename="x.png"\r\n'
    b"Content-Type: image/png\r\n\r\n"
)
GOOD = http_request(
    body=PART + picture() + b"\r\n--b--\r\n", content_type="multipart/form-data; boundary=b"
)


@dataclass
class Outcome:
    """Counts of the answers of one service, and the growth of its memory."""

    name: str
    generated: Counter[int]
    forms: Counter[int]  # by status: forms with one image, which both must accept
    not_one_shape: int  # errors without the service's documented form
    invalid_json: int
    unknown: Counter[int]
    growth_mb: float
    good_afterwards: int  # correct answers to 100 valid requests afterwards
    scrape_s: float  # seconds of GET /metrics afterwards

    def row(self) -> str:
        server_faults = sum(count for status, count in self.generated.items() if status >= 500)
        cells = [
            server_faults,
            self.generated[REFUSED],
            self.forms[200],
            self.not_one_shape,
            self.invalid_json,
        ]
        cells += [sum(count for status, count in self.unknown.items() if status != 404)]
        return (
            f"| {self.name} | {' | '.join(map(str, cells))} | {self.growth_mb:.0f} | "
            f"{self.good_afterwards} | {1000 * self.scrape_s:,.0f} |"
        )


def has_one_shape(answer: Answer) -> bool:
    try:
        return list(answer.content) == ["error"] and set(answer.content["error"]) == {
            "code",
            "message",
            "field",
            "request_id",
        }
    except (ValueError, KeyError, TypeError):
        return False


def is_invalid(answer: Answer) -> bool:
    """Return True if the answer is declared as JSON and is not valid JSON."""
    if (
        not answer.headers.get(b"content-type", b"").startswith(b"application/json")
        or not answer.body
    ):
        return False
    try:
        return answer.content is NotImplemented
    except ValueError:
        return True


def memory_mb(port: int) -> float:
    """Return the memory of the server on that port, with its workers, in MB."""
    listening = next(
        one.pid
        for one in psutil.net_connections("tcp")
        if one.status == "LISTEN" and one.laddr.port == port
    )
    process = psutil.Process(listening)
    parents = [parent for parent in process.parents() if "bentoml" in " ".join(parent.cmdline())]
    family = {
        one.pid: one
        for root in [process, *parents[:1]]
        for one in [root, *root.children(recursive=True)]
    }
    return float(sum(one.memory_info().rss for one in family.values()) / 1e6)


def measure(name: str, target: str, folder: Path, num_requests: int, num_unknown: int) -> Outcome:
    cases = [image_case(seed) for seed in range(num_requests)]
    # Not compared: HEAD, which has no body, and BentoML's own pages, which are not its API.
    cases = [case for case in cases if not case.request.startswith(b"HEAD ")]
    with started(target, folder) as url:
        port = int(url.rpartition(":")[2])
        ask_each(url, [case.request for case in cases[:500]], 16)
        before = memory_mb(port)
        answers = ask_each(url, [case.request for case in cases], 16)
        paths = [http_request(f"/scan/{number}", method="GET") for number in range(num_unknown)]
        unknown = by_status(ask_each(url, paths, 16))
        growth = memory_mb(port) - before
        right = [
            answer
            for answer in answers
            if cases[answer.number].right is not None and answer.status == 200
        ]
        forms = [answer for answer in right if cases[answer.number].kind == "right form"]
        assert name != "the service" or all(
            is_right(cases[answer.number], answer.content) for answer in right
        )
        (scrape,) = ask_each(url, [http_request("/metrics", method="GET")], 1)
        return Outcome(
            name=name,
            generated=by_status(answers),
            forms=by_status(forms),
            not_one_shape=sum(
                400 <= answer.status < 500 and not has_one_shape(answer) for answer in answers
            ),
            invalid_json=sum(map(is_invalid, answers)),
            unknown=unknown,
            growth_mb=growth,
            good_afterwards=by_status(ask_each(url, [GOOD] * 100, 8))[200],
            scrape_s=scrape.seconds,
        )


def main() -> None:
    num_requests = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_REQUESTS
    num_unknown = min(NUM_UNKNOWN, num_requests)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        certify(folder / "certificate.json", write_bundle(folder / "bundle"))
        services = [
            ("the service", "slipway.serving.service:Slipway"),
            ("an ordinary BentoML API", "bench.stock_service:Stock"),
        ]
        outcomes = [
            measure(name, target, folder, num_requests, num_unknown) for name, target in services
        ]
    head = (
        "| Served by | 5xx | broken connections | right forms answered | 4xx in another shape | "
        "invalid JSON | unknown paths not 404 "
        "| memory grown, MB | right requests answered afterwards, of 100 | `/metrics` afterwards, "
        "ms |"
    )
    statuses = "\n".join(
        f"* {one.name}: "
        + ", ".join(f"{code}: {count:,}" for code, count in sorted(one.generated.items()))
        for one in outcomes
    )
    notes = (
        f"{num_requests:,} generated requests (images, forms, other bodies, methods, headers, "
        "paths; the same to both), "
        f"then {num_unknown:,} unknown paths, over 16 connections, after 500 for warming up. The "
        "ordinary API takes forms with one image "
        "only, so a refusal of an image as the body is right of it. "
        f"{conditions('bentoml', 'uvicorn', 'starlette')}"
    )
    lines = [head, "|" + "---|" * 10, *(one.row() for one in outcomes)]
    text = (
        "# Under fire\n\n"
        + "\n".join(lines)
        + f"\n\nAnswers to the generated requests, by status (0: none):\n\n{statuses}\n\n{notes}\n"
    )
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
