"""Tests of progress reports, which must not flood a log."""

import re
from collections.abc import Iterator

import pytest

from slipway.data.engine.progress import progress
from tests.fake_clock import FakeClock


def test_the_progress_bar_passes_items_through_in_order() -> None:
    assert list(progress(iter("abc"), "clean", 3)) == ["a", "b", "c"]


def test_the_progress_bar_writes_no_line_to_a_log_if_the_pass_is_quick(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sum(progress(range(50_000), "clean", 50_000)) == 1_249_975_000
    assert capsys.readouterr().err == ""


def test_the_time_left_follows_the_mean_rate_although_images_come_in_bursts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr("tqdm.std.time", clock.perf_counter)

    def blocks() -> Iterator[int]:
        for pause in [11.0, 31.0] * 10:
            clock.sleep(pause)
            yield 100

    list(progress(blocks(), "clean", 10_000, lambda images: images))
    shown = re.findall(r"(\d+)/10000 \[([\d:]+)<([\d:]+),", capsys.readouterr().err)
    assert len(shown) >= 15
    for num_images, passed, left in shown:
        mean = _seconds(passed) / int(num_images) * (10_000 - int(num_images))
        assert abs(_seconds(left) - mean) <= 0.02 * mean


def test_a_log_gets_lines_without_bars(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr("tqdm.std.time", clock.perf_counter)
    for number in progress(range(6), "clean", None):
        clock.sleep(11.0 + number)
    lines = capsys.readouterr().err
    assert re.match(r"clean: \d+ \[\d\d:\d\d, ", lines)
    assert not {"|", "\r", "█", "%"} & set(lines)


def _seconds(text: str) -> int:
    return sum(int(part) * 60**place for place, part in enumerate(reversed(text.split(":"))))
