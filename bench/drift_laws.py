"""Measures false alarms, power and delay of the drift tests, and the error of the quality estimate.

`python -m bench.drift_laws` simulates streams of traffic, each with its own random reference. It
also adds faults such as blur to real images: the digits, and CIFAR-10 if it is available. It prints
and writes tables, and takes minutes on one core. `python -m bench.drift_laws 50` simulates a
fiftieth of the streams.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.conditions import conditions
from bench.drift_estimates import estimates
from bench.drift_images import (
    CIFAR10,
    DIGITS,
    Pixels,
    RealData,
    blurred,
    inverted,
    noisy,
    real_data,
    table,
)
from slipway.drift import distributions
from slipway.drift.two_sample_tests import TwoSampleTest, kolmogorov_smirnov, mann_whitney, psi
from slipway.drift.verdict import Budget, judge
from slipway.drift.window import Window
from slipway.system import files
from tests.drift.populations import (
    ORDINARY,
    reference_of,
    window_of,
)

RESULT = Path("bench/results/drift_laws.md")
NUM_STREAMS, WINDOWS, NUM_FEATURES, NUM_BINS = 1000, 720, 20, 10
WINDOW_ROWS = 1000
NUM_TESTS = 3 * NUM_FEATURES + 2  # three for each number, one for the classes, one joint test
STATISTICS = (psi, kolmogorov_smirnov, mann_whitney)

Counts = NDArray[np.int64]


def reference_bins(
    random: np.random.Generator, num_rows: int
) -> tuple[Counts, NDArray[np.float64]]:
    """Draw the counts of a uniform reference in ten bins, and the true fraction of each bin."""
    ordered = np.sort(random.uniform(size=num_rows))
    starts = np.arange(1, NUM_BINS) * num_rows // NUM_BINS
    return np.diff([0, *starts, num_rows]), np.diff([0, *ordered[starts], 1])


def shifted(
    random: np.random.Generator, num_rows: int, shift: float
) -> tuple[Counts, NDArray[np.float64]]:
    """Draw as `reference_bins`, for normal values that traffic shifts by `shift` deviations."""
    ordered = np.sort(random.normal(size=num_rows))
    starts = np.arange(1, NUM_BINS) * num_rows // NUM_BINS
    edges = ordered[starts] - shift
    below = np.where(
        edges < 0, distributions.normal_tail(edges) / 2, 1 - distributions.normal_tail(edges) / 2
    )
    return np.diff([0, *starts, num_rows]), np.diff([0, *below, 1])


def logarithmic_psi(windows: Counts, reference: Counts, level: float) -> TwoSampleTest:
    """Test by the usual population stability index, with half a row added to each bin."""
    p, q = (
        (counts + 0.5) / (counts.sum(axis=-1, keepdims=True) + 0.5 * counts.shape[-1])
        for counts in (windows, reference)
    )
    values = ((p - q) * np.log(p / q)).sum(axis=-1)
    scale = 1 / windows.sum(axis=-1) + 1 / reference.sum()
    return TwoSampleTest(
        "psi",
        values,
        distributions.chi_square_threshold(level, NUM_BINS - 1) * scale,
        values,
    )


def tails(share: int) -> str:
    """Measure the rate of exceeded thresholds relative to the nominal level, without drift."""
    random, lines = np.random.default_rng(1), []
    for num_reference, num_rows in (
        (300, 200),
        (1500, 100),
        (1500, 1000),
        (5000, 1000),
        (20000, 1000),
        (1500, 10000),
    ):
        for level in (1e-2, 1e-3, 1e-4):
            exceeded = dict.fromkeys(
                ("psi", "logarithmic psi", "kolmogorov_smirnov", "mann_whitney"), 0
            )
            thumb, total = 0, 0
            for _ in range(max(40, 2000 // share)):
                reference, shares = reference_bins(random, num_reference)
                windows = random.multinomial(num_rows, shares, size=500)
                for name, law in zip(
                    exceeded, (psi, logarithmic_psi, kolmogorov_smirnov, mann_whitney), strict=True
                ):
                    exceeded[name] += int(law(windows, reference, level).exceeded.sum())
                thumb += int((psi(windows, reference, level).values > 0.1).sum())
                total += 500
            ratios = [f"{count / total / level:.2f}" for count in exceeded.values()]
            lines.append(
                [
                    num_reference,
                    num_rows,
                    f"{level:g}",
                    f"{total:,}",
                    *ratios,
                    f"{thumb / total:.1%}",
                ]
            )
    header = [
        "reference rows",
        "window rows",
        "level",
        "windows",
        "psi",
        "psi with logarithms",
        "Kolmogorov-Smirnov",
        "Mann-Whitney",
    ]
    return table([*header, "psi > 0.1"], lines)


def clean_streams(share: int) -> str:
    """Count the alarms in 30 days without drift, by the tests of `judge` on simulated counts.

    A stream has 720 windows, 20 features and the predicted classes.
    """
    random, lines = np.random.default_rng(2), []
    level = Budget().level / NUM_TESTS
    for num_reference, num_classes_reference, num_rows in (
        (300, 300, 200),
        (1500, 260, 1000),
        (5000, 1000, 1000),
        (20000, 5000, 1000),
    ):
        alarms = []
        for _ in range(NUM_STREAMS // share):
            alarmed = np.zeros(WINDOWS, np.bool_)
            for _ in range(NUM_FEATURES):
                reference, shares = reference_bins(random, num_reference)
                windows = random.multinomial(num_rows, shares, size=WINDOWS)
                for statistic in STATISTICS:
                    alarmed |= statistic(windows, reference, level).exceeded
            classes = random.multinomial(num_classes_reference, [0.1] * 10)
            alarmed |= psi(
                random.multinomial(num_rows, [0.1] * 10, size=WINDOWS), classes, level
            ).exceeded
            alarms.append(int(alarmed.sum()))
        found = np.array(alarms)
        more = f"{(found > 1).mean():.1%}"
        lines.append(
            [
                num_reference,
                num_classes_reference,
                num_rows,
                len(found),
                f"{found.mean():.2f}",
                f"{(found == 0).mean():.1%}",
                more,
            ]
        )
    header = [
        "reference rows, input",
        "reference rows, answer",
        "window rows",
        "streams of 30 days",
        "alarms a stream",
    ]
    return table([*header, "streams without", "streams with two or more"], lines)


def whole_streams(share: int) -> str:
    """Count alarms as `clean_streams`, with features extracted from rows and all of `judge`."""
    random, lines = np.random.default_rng(3), []
    for num_reference, num_rows in ((300, 200), (1500, 1000)):
        alarms, windows, seconds = 0, 0, 0.0
        for _ in range(max(2, 100 // share)):
            reference = reference_of(ORDINARY.draw(random, num_reference))
            for _ in range(72):
                window = window_of(reference, ORDINARY.draw(random, num_rows))
                started = time.perf_counter()
                alarms += judge(reference, window).drifted
                seconds += time.perf_counter() - started
                windows += 1
        lines.append(
            [
                num_reference,
                num_rows,
                windows,
                alarms,
                f"{windows / WINDOWS:.1f}",
                f"{seconds / windows * 1000:.1f}",
            ]
        )
    return table(
        ["reference rows", "window rows", "windows", "alarms", "allowed", "ms to judge a window"],
        lines,
    )


def found_within(random: np.random.Generator, alarmed: Callable[[int], bool], num_rows: int) -> int:
    """Count the requests from a shift, at a random point of a window, to the first alarm."""
    before = int(random.integers(WINDOW_ROWS))  # rows of the first window before the shift
    for number in range(num_rows // WINDOW_ROWS + 1):
        if alarmed(before if number == 0 else 0):
            return (number + 1) * WINDOW_ROWS - before
    return num_rows + WINDOW_ROWS


def synthetic_shifts(share: int) -> str:
    """Measure the power for a shift of one of 20 features, and of one of ten classes."""
    random, lines = np.random.default_rng(4), []
    level, streams = Budget().level / NUM_TESTS, max(100, 4000 // share)

    def shift_found(num_reference: int) -> int:
        state = random.bit_generator.state
        reference, clean = shifted(random, num_reference, 0.0)
        random.bit_generator.state = state
        _, moved = shifted(random, num_reference, 0.25)

        def alarmed(before: int) -> bool:
            window = random.multinomial(before, clean) + random.multinomial(
                WINDOW_ROWS - before, moved
            )
            return any(
                bool(statistic(window, reference, level).exceeded) for statistic in STATISTICS
            )

        return found_within(random, alarmed, 5000)

    def classes_found(num_reference: int) -> int:
        clean, moved = np.full(10, 0.1), np.array([0.2, *[0.8 / 9] * 9])
        reference = random.multinomial(num_reference, clean)

        def alarmed(before: int) -> bool:
            window = random.multinomial(before, clean) + random.multinomial(
                WINDOW_ROWS - before, moved
            )
            return bool(psi(window, reference, level).exceeded)

        return found_within(random, alarmed, 5000)

    kinds = (
        ("0.25 deviations in one of 20 features", shift_found),
        ("ten points more of one of ten classes", classes_found),
    )
    for name, simulate in kinds:
        for num_reference in (260, 500, 1000, 1500, 3000, 5000, 20000):
            needed = np.array([simulate(num_reference) for _ in range(streams)])
            within = [f"{(needed <= limit).mean():.1%}" for limit in (2000, 5000)]
            lines.append([name, num_reference, streams, *within, f"{np.median(needed):.0f}"])
    return table(
        [
            "shift",
            "reference rows",
            "streams",
            "found within 2,000",
            "within 5,000",
            "median requests",
        ],
        lines,
    )


FAULTS: dict[str, Callable[[Pixels, np.random.Generator], Pixels]] = {
    "blurred": blurred,
    "noisy": noisy,
    "inverted": inverted,
}


def real_shifts(data: RealData, share: int) -> Iterator[list[object]]:
    """Measure alarms with a fault in 20 % of the images, and false alarms without a fault."""
    random = np.random.default_rng(6)
    clean = data.features(data.pixels)
    streams = max(20, 400 // share)
    for name, fault in FAULTS.items():
        spoiled = data.features(fault(data.pixels, random))

        def alarmed(before: int, spoiled: NDArray[np.float32] = spoiled) -> bool:
            rows = random.integers(len(clean), size=WINDOW_ROWS)
            is_spoiled = (random.uniform(size=WINDOW_ROWS) < 0.2) & (
                np.arange(WINDOW_ROWS) >= before
            )
            window = Window(data.reference)
            window.add(np.where(is_spoiled[:, None], spoiled[rows], clean[rows]))
            return judge(data.reference, window).drifted

        needed = np.array([found_within(random, alarmed, 5000) for _ in range(streams)])
        yield [
            f"20 % {name}",
            streams,
            *[f"{(needed <= limit).mean():.1%}" for limit in (2000, 5000)],
            f"{np.median(needed):.0f}",
        ]
    alarms = 0
    for _ in range(streams):
        window = Window(data.reference)
        window.add(clean[random.integers(len(clean), size=WINDOW_ROWS)])
        alarms += judge(data.reference, window).drifted
    yield ["none", streams, f"{alarms} alarms", f"{streams / WINDOWS:.1f} allowed", ""]


def real_images(share: int) -> str:
    lines: list[list[object]] = []
    for name, path, size_px, channels, num_rows in (
        ("digits", DIGITS, 16, 1, 1797),
        ("CIFAR-10", CIFAR10, 32, 3, 50000),
    ):
        if not path.exists():
            continue
        data = real_data(path, size_px, channels, num_rows)
        described = f"{name}, {data.reference.inputs.rows:,} and {data.reference.answers.rows:,}"
        lines += [[described, *line] for line in real_shifts(data, share)]
    return table(
        [
            "images, reference rows of input and answer",
            "fault",
            "streams",
            "found within 2,000",
            "within 5,000",
            "median",
        ],
        lines,
    )


PARTS: dict[str, Callable[[int], str]] = {
    "Is a law true? Times as often beyond the threshold as its level says": tails,
    "False alarms in 30 days of hourly windows, 20 features and a class mix": clean_streams,
    "False alarms of everything: rows, features, all tests of `judge`": whole_streams,
    "Shifts that are found, windows of 1,000 rows, the shift at any point of one": synthetic_shifts,
    "Faults of real images that are found": real_images,
    "Accuracy without labels against the truth of the same rows": estimates,
}


def main() -> None:
    share = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    text = (
        "# Laws of drift\n\nAll at the default budget: one false alarm in 30 days of hourly "
        "windows, over all features and tests.\n"
    )
    for title, part in PARTS.items():
        started = time.monotonic()
        text += f"\n## {title}\n\n{part(share)}\n"
        print(f"{title}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    text += (
        f"\n{conditions('numpy', 'scikit-learn', 'pillow')} A share of 1/{share} of the streams.\n"
    )
    print(text)
    if share == 1:
        files.write_text(RESULT, text)


if __name__ == "__main__":
    main()
