"""A slow rank is named after three slow measurements in a row, a hanging one after minutes."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipway.training.telemetry.rank_times import (
    LayerTimes,
    RankTime,
    SlowRankFinder,
    StalledRank,
    describe_stall,
)
from tests.training.conftest import write_project
from tests.training.forked_runs import run_forked
from tests.training.real_runs import run_training
from tests.training.text_projects import write_text_project


def _times(*own_ms: float) -> list[RankTime]:
    return [RankTime(f"node{rank}", 10.0, own - 10.0) for rank, own in enumerate(own_ms)]


def test_a_rank_that_is_slow_in_three_consecutive_measurements_is_reported_once() -> None:
    finder, slow = SlowRankFinder(), _times(100.0, 100.0, 260.0, 110.0)
    assert [finder.add(slow) for _ in range(2)] == [None, None]
    assert finder.add(slow) == (
        "rank 2 on node2 takes 260.0 ms of a step by itself (waiting for batches 10.0 ms, its "
        "layers 250.0 ms), the other ranks 100.0 ms (median), and they wait for it"
    )
    assert finder.add(slow) is None


def test_ranks_that_are_slow_in_turn_or_nearly_equal_are_not_reported() -> None:
    finder = SlowRankFinder()
    for own in [(100.0, 200.0), (200.0, 100.0)] * 5:
        assert finder.add(_times(*own)) is None
    for _ in range(5):
        assert finder.add(_times(100.0, 149.0)) is None


def test_a_slow_rank_that_recovers_and_slows_down_again_is_reported_again() -> None:
    finder, found = SlowRankFinder(), []
    for own in [(100.0, 200.0)] * 3 + [(100.0, 100.0)] + [(100.0, 200.0)] * 3:
        found.append(finder.add(_times(*own)))
    assert sum(one is not None for one in found) == 2


def _stalled(*counts: int) -> dict[int, StalledRank]:
    return {
        rank: StalledRank(
            host=f"node{rank}", process=70 + rank, count=count, part=f"part {count}", line="a.py:1"
        )
        for rank, count in enumerate(counts)
    }


def test_the_stall_message_names_the_rank_that_is_furthest_behind() -> None:
    text = describe_stall(_stalled(12, 12, 11, 12), 4, 6.0)
    assert text.startswith(
        "no step has ended for 6 minutes: rank 2 on node2 (process 72) in part 11, at a.py:1; the "
        "other ranks wait for it. "
    )
    assert "rank 1" not in text
    assert text.endswith("it resumes from its newest checkpoint.")


def test_the_stall_message_names_all_ranks_if_they_are_equally_far() -> None:
    text = describe_stall(_stalled(12, 12), 2, 6.0)
    assert "rank 0 on node0" in text
    assert "rank 1 on node1 (process 71) in part 12, at a.py:1; no rank is ahead" in text


def test_the_stall_message_says_that_a_rank_without_a_file_has_stopped() -> None:
    found = _stalled(12, 12, 12)
    del found[1]
    assert "rank 1 gives no sign of life, and the other ranks wait" in describe_stall(found, 3, 6.0)


@pytest.mark.nightly(seconds=60)
def test_the_run_log_records_the_step_times_of_each_rank(tmp_path: Path) -> None:
    project = write_project(tmp_path, epochs=2, devices=2, log_every_steps=2)
    assert run_training(project).returncode == 0
    lines = (project / ".work/log/train.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    measured = [event["ranks"] for event in events if event["event"] == "ranks"]
    assert measured
    for ranks in measured:
        assert [set(rank) for rank in ranks] == [{"host", "wait_ms", "forward_ms"}] * 2
        assert all(rank["forward_ms"] > 0 for rank in ranks)


class _Timed(nn.Identity):
    """A layer that takes `seconds` of a clock; a strategy takes 100 before and after its call."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds
        self.register_forward_pre_hook(lambda *_: self._take(100))
        self.register_forward_hook(lambda *_: self._take(100))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._take(self._seconds)
        return inputs

    def _take(self, seconds: float) -> None:
        self._clock[0] += seconds


def test_the_time_of_layers_leaves_out_what_the_strategy_does_around_their_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    network = nn.Sequential(_Timed(clock, 2), nn.Sequential(_Timed(clock, 3)))
    times = LayerTimes(network)
    found = []
    for from_zero in (True, False, True):
        times.start(from_zero=from_zero)
        network(torch.ones(1))
        times.stop()
        network(torch.ones(1))
        found.append(times.seconds())
    assert found == [5, 10, 5]
    assert clock == [6 * 405]


def test_a_compiled_network_which_exchanges_nothing_is_measured_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    network = nn.Sequential(_Timed(clock, 2))
    network.compile(backend="eager")
    times = LayerTimes(network)
    times.start(from_zero=True)
    clock[0] += 7
    times.stop()
    assert times.seconds() == 7


def slow_down_rank_1(class_name: str) -> None:
    """Make every layer of the class `class_name` of torch take 0.2 s longer on rank 1."""
    if os.environ.get("LOCAL_RANK") != "1":
        return
    kind = getattr(nn, class_name)
    forward = kind.forward

    def slow(self: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        answers: torch.Tensor = forward(self, inputs)
        return answers

    kind.forward = slow


@pytest.mark.process
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        *(
            pytest.param(strategy, marks=pytest.mark.nightly)
            for strategy in ("fsdp", "deepspeed_stage_3", "tensor_parallel", "pipeline")
        ),
    ],
)
def test_a_slow_rank_is_named_except_in_a_pipeline(tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "devices": 2, "log_every_steps": 1}
    if strategy in ("tensor_parallel", "pipeline"):
        project = write_text_project(tmp_path, epochs=4, **settings)
        code, output = run_forked(project, slow_down_rank_1, "LayerNorm")
    else:
        project = write_project(tmp_path, epochs=2, **settings)
        code, output = run_forked(project, slow_down_rank_1, "Linear")
    assert code == 0, output
    named = re.findall(r"^slow      rank (\d) on .* takes ([\d.,]+) ms", output, re.MULTILINE)
    assert [rank for rank, _ in named] == ([] if strategy == "pipeline" else ["1"]), output
    events = map(json.loads, (project / ".work/log/train.jsonl").read_text().splitlines())
    layers = [
        [rank["forward_ms"] for rank in event["ranks"]] for event in events if "ranks" in event
    ]
    assert len(layers) >= 4
    assert all(second >= 200 for _, second in layers)
