"""Counts answered requests of several images while callers send far more than can be served.

`python -m bench.form_overload [ROUNDS]` measures 8 callers, 300 callers that retry at once, and 300
that obey `Retry-After`, in short interleaved turns against one service. It prints and writes one
table. Each caller sends its next request when it has an answer.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench.conditions import conditions
from slipway.inputs.multipart import encode_images
from slipway.serving.load_test.load import Callers, http_request, run
from slipway.system import files
from tests.serving.bundles import certify, picture, slow_classifier, write_bundle
from tests.serving.server import running

NUM_IMAGES = 32
FEW, MANY = 8, 300
TURN_S = (
    8.0  # it begins with as many bodies at once as there are callers, which takes a second or two
)
NUM_ROUNDS = 5
WORK = 1  # of `slow_classifier`
RESULT = Path("bench/results/form_overload.md")
TURNS = {
    f"{FEW} callers": (FEW, False),
    f"{MANY} callers": (MANY, False),
    f"{MANY} that heed Retry-After": (MANY, True),
}


def form(number: int = 0, num_images: int = NUM_IMAGES) -> bytes:
    """Build a request with one form of `num_images` images."""
    content_type, body = encode_images(
        [picture(number + position, (64, 64)) for position in range(num_images)]
    )
    return http_request(body=body, content_type=content_type)


async def turn(
    url: str, num_callers: int, *, heeds: bool, seconds: float = TURN_S
) -> tuple[float, Counter[int]]:
    """Return the forms answered per second, and the number of answers of each status."""
    callers, forms = Callers(url), [form(number) for number in range(4)]
    ends = time.perf_counter() + seconds

    async def call(number: int) -> None:
        while time.perf_counter() < ends:
            answer = await callers.ask(number, forms[number % len(forms)])
            if heeds and b"retry-after" in answer.headers:
                wait_s = float(answer.headers[b"retry-after"])
                await asyncio.sleep(min(wait_s, max(0.0, ends - time.perf_counter())))

    await asyncio.gather(*(call(number) for number in range(num_callers)))
    callers.close()
    statuses = Counter(answer.status for answer in callers.answers)
    in_time = sum(
        answer.status == 200 and answer.due + answer.seconds <= ends for answer in callers.answers
    )
    return in_time / seconds, statuses


def measure(
    url: str, num_rounds: int, seconds: float = TURN_S
) -> tuple[dict[str, list[float]], dict[str, Counter[int]]]:
    """Measure goodput and statuses of each turn in each round; the first turns do not count."""
    goodput: dict[str, list[float]] = {name: [] for name in TURNS}
    statuses: dict[str, Counter[int]] = {name: Counter() for name in TURNS}
    for num_callers, heeds in TURNS.values():
        run(turn(url, num_callers, heeds=heeds, seconds=1.0))
    for _ in range(num_rounds):
        for name, (num_callers, heeds) in TURNS.items():
            answered, found = run(turn(url, num_callers, heeds=heeds, seconds=seconds))
            goodput[name].append(answered)
            statuses[name] += found
    return goodput, statuses


def main() -> None:
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_ROUNDS
    lines = [
        "| Model | Callers | forms/s | lowest | of 8 callers | answers |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        for name, work in (("quick", 0), ("slow", WORK)):
            folder = Path(temporary) / name
            certify(
                folder / "certificate.json",
                write_bundle(folder / "bundle", slow_classifier(work) if work else None),
            )
            with running(folder) as server:
                server.wait()
                goodput, statuses = measure(server.url, num_rounds)
            few = goodput[f"{FEW} callers"]
            for turn_name, figures in goodput.items():
                ratio = statistics.median(
                    many / one for many, one in zip(figures, few, strict=True)
                )
                counts = ", ".join(
                    f"{status}: {number}" for status, number in sorted(statuses[turn_name].items())
                )
                lines.append(
                    f"| {name} | {turn_name} | {statistics.median(figures):,.0f} | "
                    f"{min(figures):,.0f} | {ratio:.0%} | {counts} |"
                )
    notes = (
        f"n = {num_rounds} rounds of interleaved turns of {TURN_S:g} s, medians; forms of "
        f"{NUM_IMAGES} PNG of 64 x 64 pixels; status 0 "
        "is a broken connection. Service and callers share the cores. "
        f"{conditions('bentoml', 'uvicorn', 'uvloop', 'onnxruntime-gpu')}"
    )
    text = "# Overload with forms of several images\n\n" + "\n".join(lines) + f"\n\n{notes}\n"
    print(text)
    files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
