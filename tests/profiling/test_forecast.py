"""Tests of forecasts of the step time, of bottlenecks, and of proposed settings."""

from dataclasses import replace
from typing import Any

import pytest

from slipway.config.training import TrainParams
from slipway.profiling.candidates import find_bottleneck, trial_candidates
from slipway.profiling.forecast import Facts, best_num_workers, expected_step_ms
from slipway.profiling.loader_times import LoaderTimes
from slipway.profiling.step_times import PARTS, Clock, Part
from slipway.training.distributed.placement import Placement
from tests.project_params import PROJECT

WAITING = {0: 80.0, 1: 80.0, 2: 40.0, 4: 20.0}


def _loader(**changes: Any) -> LoaderTimes:
    values = {
        "batch_ms": WAITING,
        "processor_ms": 1.0,
        "queued_ms": 0.0,
        "read_ms": 78.0,
        "read_processor_ms": 0.5,
        "read_queued_ms": 0.0,
        "copy_ms": 0.1,
        "handover_ms": 0.5,
    }
    return LoaderTimes(**{**values, **changes})


def _facts(**changes: Any) -> Facts:
    found = Facts(
        step_ms=90.0,
        data_ms=80.0,
        compute_ms=10.0,
        compute_processor_ms=15.0,
        loader=_loader(),
        num_workers=0,
        num_accumulated=1,
        num_processes=1,
        num_cores=2,
    )
    return replace(found, **changes)


def test_without_loader_processes_the_time_of_a_batch_is_added_to_the_step() -> None:
    assert expected_step_ms(_facts(), 0) == 90.0


@pytest.mark.parametrize(("num_workers", "expected"), [(1, 80.0), (2, 40.0), (4, 20.0)])
def test_with_loader_processes_a_step_takes_the_longer_of_loading_and_computing(
    num_workers: int, expected: float
) -> None:
    assert expected_step_ms(_facts(), num_workers) == expected


def test_the_forecast_step_time_is_never_below_its_computing_time() -> None:
    assert (
        expected_step_ms(_facts(loader=_loader(batch_ms={0: 4.0, 1: 4.0, 2: 2.0, 4: 1.0})), 2)
        == 10.5
    )


def test_the_forecast_divides_the_cores_among_trainer_and_loader_processes() -> None:
    busy = _loader(processor_ms=80.0, batch_ms={0: 80.0, 1: 82.0, 2: 41.0, 4: 41.0})
    assert expected_step_ms(_facts(loader=busy), 4) == (82.0 + 15.0) / 2


def test_the_forecast_adds_the_waiting_time_of_each_accumulated_batch() -> None:
    assert expected_step_ms(_facts(num_accumulated=3), 4) == 60.0


def test_best_num_workers_is_the_fewest_with_nearly_the_shortest_step() -> None:
    assert best_num_workers(_facts()) == 4
    assert best_num_workers(_facts(compute_ms=60.0)) == 2
    assert (
        best_num_workers(
            _facts(loader=_loader(batch_ms={0: 0.1, 1: 2.0, 2: 1.5, 4: 1.5}), data_ms=0.1)
        )
        == 0
    )


def _parts(**milliseconds: float) -> dict[Part, float]:
    return {part: milliseconds.get(part, 1.0) for part in PARTS}


@pytest.mark.parametrize(
    ("parts", "loader", "is_jpeg", "name"),
    [
        ({"data": 80.0}, {}, False, "reading"),
        ({"data": 80.0}, {"read_ms": 1.0, "processor_ms": 75.0}, False, "making batches"),
        ({"data": 80.0}, {"read_processor_ms": 75.0, "processor_ms": 78.0}, True, "decoding"),
        ({"data": 80.0}, {}, True, "reading"),
        ({"forward": 20.0, "backward": 40.0, "data": 50.0}, {}, False, "compute"),
        ({"communication": 50.0}, {}, False, "communication"),
        ({"optimizer": 50.0}, {}, False, "optimizer"),
        ({"copy": 50.0}, {}, False, "copy"),
        ({"other": 50.0}, {}, False, "loop"),
    ],
)
def test_bottleneck_is_the_largest_part_of_the_step(
    parts: dict[str, float], loader: dict[str, float], is_jpeg: bool, name: str
) -> None:
    assert (
        find_bottleneck(_parts(**parts), _facts(loader=_loader(**loader)), is_jpeg=is_jpeg).name
        == name
    )


def test_queueing_for_a_core_does_not_count_as_waiting_for_a_disk() -> None:
    crowded = _loader(processor_ms=35.0, queued_ms=40.0)
    assert not _facts(loader=crowded).loader_waits
    assert _facts(loader=_loader(processor_ms=35.0)).loader_waits


def _names(placement: Placement, **train: Any) -> set[str]:
    params: TrainParams = PROJECT.train.model_copy(update={"batch_size": 32, **train})
    from tests.training.conftest import spec

    return {
        candidate.name
        for candidate in trial_candidates(
            params, placement, spec().task, num_train=100, num_cores=2
        )
    }


def test_profile_proposes_only_changes_that_apply_to_the_current_settings() -> None:
    single = _names(Placement("single", "32-true", "cpu", 1, 1, None, None, ()))
    assert {
        "precision bf16-mixed, channels_last false",
        "channels_last false",
        "strategy ddp, devices 2",
        "batch_size 64",
    } <= single
    zero = _names(Placement("deepspeed_stage_2", "16-mixed", "gpu", 1, 1, None, None, ()))
    assert {"precision bf16-mixed", "strategy single"} <= zero
    assert not any("channels_last" in name for name in zero)
    assert "batch_size 128" not in _names(
        Placement("single", "32-true", "cpu", 1, 1, None, None, ()), batch_size=64
    )


def test_the_clock_assigns_all_time_to_parts_of_the_step() -> None:
    clock = Clock()
    for part in PARTS * 50:
        clock.end(part)
    found = clock.round(10, row_length=28.0)
    assert sum(found.parts_ms.values()) == pytest.approx(found.step_ms)
