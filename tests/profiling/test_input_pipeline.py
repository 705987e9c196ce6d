"""Tests of the measured times per image, and of their prediction for more workers."""

from collections.abc import Iterator

import pytest

from slipway.data.sources.samples import RawSample
from slipway.inputs.images import ImageContract, TransformContract
from slipway.inputs.user_function import code_digest
from slipway.profiling import input_pipeline
from slipway.profiling.input_pipeline import RawTimes, time_raw_rows
from slipway.system.errors import DataError
from tests.data.pictures import picture
from tests.fake_clock import CLOCK
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

CONTRACT = ImageContract(
    kind="images",
    transform=None,
    size_px=8,
    channels=1,
    resize_mode="stretch",
    interpolation="bilinear",
    max_pixels=10_000,
)
SLOW = """from tests.fake_clock import CLOCK


def wait(image):
    CLOCK.sleep(0.02)
    return image
"""


@pytest.fixture(autouse=True)
def _fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_pipeline, "time", CLOCK)


def _samples(count: int, seconds: float = 0.0) -> Iterator[RawSample]:
    for number in range(count):
        CLOCK.sleep(seconds)
        yield RawSample(str(number), picture(number), "one", None, None, None)


def test_raw_times_name_a_slow_transform_as_the_largest_part(
    write_functions: WriteFunctions,
) -> None:
    write_functions("slow_of_the_profile", {"__init__.py": "", "slow.py": SLOW})
    name = "slow_of_the_profile.slow:wait"
    slow = CONTRACT.model_copy(
        update={"transform": TransformContract(function=name, sha256=code_digest(name))}
    )
    found = time_raw_rows(_samples(8), slow)
    assert found.largest == "transform"
    assert found.transform_ms == pytest.approx(20, abs=0.1)
    assert found.processor_ms < found.worker_ms / 2
    assert time_raw_rows(_samples(8), CONTRACT).transform_ms == 0


def test_raw_times_name_reading_from_a_slow_disk_as_the_largest_part() -> None:
    assert time_raw_rows(_samples(8, 0.02), CONTRACT).largest == "read"


def test_timing_no_images_is_an_error() -> None:
    with pytest.raises(DataError, match="no split has an image"):
        time_raw_rows([], CONTRACT)


def _times(**milliseconds: float) -> RawTimes:
    values = {
        "read_ms": 0.0,
        "decode_ms": 0.0,
        "transform_ms": 0.0,
        "resize_ms": 0.0,
        "processor_ms": 0.0,
    }
    return RawTimes(rows=8, **{**values, **milliseconds})


def test_workers_wait_in_parallel_but_share_the_cores_to_compute() -> None:
    assert _times(transform_ms=80.0).image_ms(8, num_cores=2) == 10.0
    assert _times(transform_ms=80.0, processor_ms=80.0).image_ms(8, num_cores=2) == 40.0
    assert _times(transform_ms=80.0, read_ms=30.0).image_ms(8, num_cores=2) == 30.0
    assert _times(transform_ms=80.0, read_ms=30.0).image_ms(1, num_cores=2) == 110.0


def test_best_num_workers_is_the_smallest_beyond_which_more_workers_do_not_help() -> None:
    assert _times(transform_ms=80.0, processor_ms=80.0).best_num_workers(2) == 2
    assert _times(transform_ms=80.0).best_num_workers(2) == 16
    assert _times(transform_ms=10.0, read_ms=6.0).best_num_workers(2) == 2
