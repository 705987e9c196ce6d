"""Training profile as text and as a page."""

from typing import Any

from slipway.reports.pages.charts import StackedBar, stacked_bars
from slipway.reports.pages.profile_page import profile_page, profile_text

PARTS = ("data", "copy", "forward", "backward", "communication", "optimizer", "other")


def _spread(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.9 * median, "high": 1.2 * median}


def _account(data_ms: float) -> dict[str, Any]:
    times = dict(zip(PARTS, (data_ms, 0.5, 20.0, 40.0, 0.0, 6.0, 1.0), strict=True))
    parts = {part: _spread(value) for part, value in times.items()}
    return {
        "rounds": 5,
        "step_ms": _spread(sum(times.values())),
        "parts_ms": parts,
        "rows_per_second": 480.0,
        "queued_fraction": 0.0,
    }


REPORT: dict[str, Any] = {
    "machine": "2 cores (x86_64), no GPU",
    "runs_as": "single, 32-true, 1 on cpu",
    "account": _account(180.0),
    "utilisation": {
        "step_flop": 9_000_000_000,
        "dtype": "float32",
        "num_devices": 1,
        "rates": {"float32": 2e11, "bfloat16": 1.5e12},
        "fraction": _spread(0.5),
    },
    "bottleneck": {
        "name": "reading",
        "fraction": 0.7273,
        "text": "73% of a step is spent waiting for its batch",
    },
    "loader": {
        "batch_ms": {"0": 180.0, "1": 181.0, "2": 90.5, "4": 45.2},
        "processor_ms": 2.0,
        "queued_ms": 0.1,
        "read_ms": 178.0,
        "read_processor_ms": 0.5,
        "read_queued_ms": 0.1,
        "copy_ms": 0.1,
        "handover_ms": 0.4,
    },
    "raw": {
        "times": {
            "rows": 64,
            "read_ms": 0.2,
            "decode_ms": 1.5,
            "transform_ms": 20.1,
            "resize_ms": 0.3,
            "processor_ms": 2.0,
        },
        "note": "",
        "num_images": 5000,
        "num_workers": 2,
        "expected_seconds": 54.0,
        "better_num_workers": 8,
        "better_seconds": 13.5,
    },
    "trials": [
        {
            "name": "compile true",
            "changes": {},
            "ratio": _spread(0.9),
            "note": "",
            "learns_otherwise": False,
            "expected_gain": 1.03,
        },
        {
            "name": "a <b>",
            "changes": {},
            "ratio": None,
            "note": "ended:\n  no",
            "learns_otherwise": False,
            "expected_gain": 0.0,
        },
    ],
    "proposal": {
        "changes": {"train.num_workers": 4, "train.compile": True},
        "expected_step_ms": 67.5,
        "expected_gain": 3.67,
        "reasons": ["4 loader processes"],
    },
    "proof": {"account": _account(2.0), "expected_gain": 3.67, "measured_gain": _spread(3.5)},
    "notes": ["one note"],
}


def test_profile_text_names_bottleneck_proposal_and_proof() -> None:
    text = profile_text(REPORT)
    for words in (
        "waiting for the batch",
        "bottleneck reading",
        "train.num_workers: 4",
        "train.compile: true",
        "your transform",
    ):
        assert words in text
    assert "expected 3.67 times as fast, measured 3.50 (3.15 to 4.20)" in text
    assert "precompute.num_workers: 8 would make it 13.5 s" in text


def test_profile_states_the_rate_of_a_step_and_its_fraction_of_the_machines_own() -> None:
    text = profile_text(REPORT)
    assert "9 GFLOP a step, 100 GFLOP/s: 50% (45% to 60%) of the rate at which the machine" in text
    assert "products of matrices here: float32 200 GFLOP/s, bfloat16 1.5 TFLOP/s" in text
    assert "of the rate of matrix products" in profile_page(REPORT)
    uncounted = {**REPORT, "utilisation": None}
    assert "GFLOP" not in profile_text(uncounted) + profile_page(uncounted)


def test_profile_names_the_rate_of_all_gpus() -> None:
    used = {**REPORT["utilisation"], "num_devices": 8}
    text = profile_text({**REPORT, "utilisation": used})
    assert "9 GFLOP a step, 800 GFLOP/s" in text
    assert "the rate at which 8 GPUs multiply matrices in float32" in text


def test_profile_without_a_proposal_says_so_in_text_and_page() -> None:
    healthy = {**REPORT, "proposal": None, "proof": None, "raw": None, "trials": []}
    assert "proposal   none" in profile_text(healthy)
    assert "None: nothing that was measured" in profile_page(healthy)


def test_profile_text_gives_the_reason_if_raw_images_were_not_measured() -> None:
    unmeasured = {
        **REPORT["raw"],
        "times": None,
        "note": "not measured: data/split/rows.parquet is missing.",
    }
    assert "precompute was not measured: data/split/rows.parquet is missing." in profile_text(
        {**REPORT, "raw": unmeasured}
    )


def test_profile_page_escapes_html_and_loads_nothing() -> None:
    written = profile_page(REPORT)
    assert "a &lt;b&gt;" in written
    assert "http" not in written
    assert written.count("<svg") == 1


def test_stacked_bars_are_proportional_to_their_parts() -> None:
    drawn = stacked_bars(
        [StackedBar("one", {"a": 30.0, "b": 10.0}), StackedBar("two", {"": 20.0})], "ms"
    )
    widths = [float(piece.split('"')[0]) for piece in drawn.split('width="')[1:]]
    assert widths[0] == 3 * widths[1]
    assert widths[2] == 2 * widths[1]
