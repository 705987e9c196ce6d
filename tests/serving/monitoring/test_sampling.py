"""Sampling under heavy load: most requests are only counted, and none is lost."""

import re
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from prometheus_client import generate_latest

from slipway.artifacts.bundle import LoadedBundle, load_bundle
from slipway.inputs.columns import ColumnContract
from slipway.inputs.contract import InputContract
from slipway.inputs.texts import TextContract
from slipway.predictor.model import AnsweredRow
from slipway.serving.metrics.service_metrics import ServiceMetrics
from slipway.serving.models.model import ServedModel
from slipway.serving.models.observers import Answered
from slipway.serving.monitoring import aggregator
from slipway.serving.monitoring.aggregator import ProcessorBudget
from slipway.serving.monitoring.metrics import MonitoringMetrics
from slipway.serving.monitoring.monitor import TrafficMonitor
from slipway.serving.monitoring.queue import TrafficQueue
from slipway.serving.monitoring.sampling import RequestSampler, RowCounts, RunningCounts
from slipway.serving.requests.payload import Payload
from tests.serving.conftest import MakeSettings
from tests.serving.monitoring.monitored import pixels
from tests.traffic.test_request_log import EXECUTION

pytestmark = pytest.mark.usefixtures("quick_monitoring")


def answered(certified: Path, number: int) -> Answered:
    """Return an observed request whose model has only the attributes that monitoring reads."""
    model = cast(
        ServedModel,
        SimpleNamespace(
            bundle=load_bundle(certified / "bundle"), selection=SimpleNamespace(actual=EXECUTION)
        ),
    )
    row = pixels(number, 1)
    answers = [
        {
            "label": "grey",
            "probabilities": {"dark": 0.2, "grey": 0.5, "bright": 0.3},
            "is_ood": False,
        }
    ]
    rows = [
        AnsweredRow(
            np.array([0.2, 0.5, 0.3], np.float32), np.float32(0.4), answers[0], ("grey", 0.5, False)
        )
    ]
    return Answered(f"id-{number}", Payload("images", (b"",)), False, row, model, rows, answers)


@pytest.mark.process
def test_processor_budget_skips_features_while_counting_continues(
    certified: Path, make_monitored: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregator, "FEATURES_BUDGET", 1e-6)
    monkeypatch.setattr(aggregator, "BURST_S", 1e-3)
    settings, service_metrics = make_monitored(), ServiceMetrics()
    registry = service_metrics.registry
    metrics = MonitoringMetrics(service_metrics)
    one = TrafficMonitor(settings, metrics, lambda: None, lambda version: None)
    one.start()
    for begin in range(0, 2000, 500):
        for number in range(begin, begin + 500):
            one.offer([answered(certified, 0)._replace(request_id=f"id-{number}")], 0.0)
        time.sleep(0.1)
    one.close()
    counted = dict(
        re.findall(
            r'slipway_monitored_rows_total{outcome="(\w+)"} (\S+)',
            generate_latest(registry).decode(),
        )
    )
    assert float(counted["monitored"]) + float(counted["skipped"]) == 2000
    assert float(counted["skipped"]) >= 1000
    assert 'slipway_classes_total{label="grey"} 2000.0' in generate_latest(registry).decode()


def test_running_counts_are_exact_while_two_threads_use_them(
    certified: Path,
) -> None:
    one = answered(certified, 0)
    others = one._replace(rows=[one.rows[0]._replace(counted=("dark", 1.0, True))] * 2)
    running, found = RunningCounts(one.bundle, "fp32"), RowCounts(one.bundle, "fp32")
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            running.move_to(found)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20_000):
        running.add([one])
        running.add([others, others])
    ended.set()
    reader.join()
    running.move_to(found)
    assert found.num_rows == 100_000
    assert found.labels == {"grey": 20_000, "dark": 80_000}
    assert found.num_ood == 80_000
    assert sum(found.confidences) == 100_000
    assert found.confidence_sum == pytest.approx(20_000 * 0.5 + 80_000)
    assert not running.is_new


@pytest.mark.parametrize(
    ("contract", "num_held"),
    [
        (ColumnContract(kind="columns", columns=[]), 1),
        (TextContract(kind="texts", columns=["text"], max_bytes=8, max_characters=None), 0),
    ],
)
def test_only_inputs_of_tables_wait_for_the_count_of_missing_values(
    certified: Path, contract: InputContract, num_held: int
) -> None:
    output = SimpleNamespace(kind="value")
    bundle = SimpleNamespace(manifest=SimpleNamespace(input=contract, output=output))
    counts = RowCounts(cast(LoadedBundle, bundle), "fp32")
    counts.add_inputs([answered(certified, 0)])
    assert len(counts.inputs) == num_held


def test_counts_of_a_retired_model_are_released_but_its_last_row_counts(
    certified: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = TrafficQueue()
    monkeypatch.setattr(queue.sampler, "divide", lambda requests: ((), requests))
    queue.offer([answered(certified, 0)], 0.0)
    (running,) = queue._running.values()
    queue.retire_counts(None)
    assert queue._running  # it got a row since the last call
    queue.retire_counts(None)
    assert not queue._running
    running.add([answered(certified, 0)])  # by the event loop, which held a reference
    ((group,), _) = queue.gather()
    assert group.counts.labels == {"grey": 2}
    assert queue.gather() == ([], 0)


def num_sampled(sampler: RequestSampler, num_requests: int) -> int:
    """Return the number of sampled requests; none is lost or repeated, in groups of 1 to 40."""
    turns = np.split(
        np.arange(num_requests), np.cumsum(np.random.default_rng(3).integers(1, 41, num_requests))
    )
    total = 0
    for turn in turns:
        whole, others = sampler.divide(turn.tolist())
        assert sorted([*whole, *others]) == turn.tolist()
        total += len(whole)
    return total


@pytest.mark.process
def test_sampling_rate_adapts_to_the_processor_time_that_was_left() -> None:
    sampler = RequestSampler()
    for _ in range(5):
        sampler.adapt(10_000, 10_000)
        assert num_sampled(sampler, 100) == 100
    sampler.adapt(10_000, 1000)  # time for a tenth
    assert 1200 < num_sampled(sampler, 10_000) < 1800
    num_rounds = 0
    while num_sampled(sampler, 1000) < 1000:
        sampler.adapt(300, num_sampled(sampler, 300))  # time for all sampled
        num_rounds += 1
    assert 2 <= num_rounds < 20
    sampler.adapt(10**6, 0)
    assert num_sampled(sampler, 10**6) > 0  # sampling never stops
    sampler.adapt(0, 0)
    assert num_sampled(sampler, 100) == 100


def test_sampling_rate_may_rise_while_a_gap_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = RequestSampler()
    sampler.adapt(1_000_000, 0)

    def rise() -> float:
        sampler.adapt(0, 0)  # as the monitoring thread does
        return 0.5

    monkeypatch.setattr("slipway.serving.monitoring.sampling.random.random", rise)
    assert sampler._draw_gap() > 0


def test_request_sampler_picks_every_position_equally_often() -> None:
    sampler, taken = RequestSampler(), Counter[int]()
    for _ in range(4000):
        sampler.adapt(1000, 200)  # time for a fifth; half as many again are sampled: 30 %
        for begin in (0, 7):
            taken.update(sampler.divide(range(begin, begin + 7))[0])
    assert set(taken) == set(range(14))
    assert all(
        1200 - 5 * 29 < count < 1200 + 5 * 29 for count in taken.values()
    )  # five standard deviations of 4,000 draws at 0.3


def test_processor_budget_is_overdrawn_by_one_piece_and_refills_with_time() -> None:
    now, spent = [0.0], [0.0]
    budget = ProcessorBudget(0.01, 0.5, clock=lambda: now[0], thread_clock=lambda: spent[0])
    for _ in range(2):
        assert budget.is_left()
        with budget.spending():
            spent[0] += 0.4
    assert not budget.is_left()
    now[0] += 29  # 0.29 s of processor time, and 0.3 are owed
    assert not budget.is_left()
    now[0] += 2
    assert budget.is_left()
    now[0] += 1e6
    with budget.spending():
        assert budget.is_left()
        spent[0] += 0.51  # the burst is the most
    assert not budget.is_left()
